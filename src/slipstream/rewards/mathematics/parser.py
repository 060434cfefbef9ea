"""Scalar expressions: from tokens to a tree, by recursive descent with a bounded depth.

The grammar is that of school mathematics as people type it: LaTeX or plain, multiplication without a sign, \\frac12,
\\sqrt3, mixed numbers, functions without brackets. Nothing is computed here.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeGuard

from slipstream.rewards.mathematics.expressions import (
    APPLIED,
    MINUS_ONE,
    Call,
    Constant,
    Node,
    Number,
    Power,
    Product,
    Sum,
    Symbol,
    UnreadableError,
    negative,
)
from slipstream.rewards.mathematics.notation import FUNCTIONS, Token

DEEPEST_NESTING = 40
"""Levels of brackets, fractions, roots and exponents; each costs the interpreter about eight calls."""

MOST_SUFFIXES = 8
"""Factorials, percent signs, primes and subscripts of one value: each is a level of the tree."""

LONGEST_NUMERAL = 2000
"""Digits of one numeral. Python refuses to convert more than 4300."""

_CLOSERS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_CONSTANTS = {"\\pi": "pi", "e": "e", "i": "i", "\\infty": "infinity", "\\imath": "i"}
_DECORATIONS = frozenset(
    {"\\overline", "\\vec", "\\hat", "\\bar", "\\widehat", "\\overrightarrow", "\\tilde", "\\mathcal", "\\mathbb"}
)
_STRUCTURAL = frozenset(
    {
        "\\cup",
        "\\cap",
        "\\in",
        "\\notin",
        "\\emptyset",
        "\\setminus",
        "\\mid",
        "\\not",
        "\\pmod",
        "\\mod",
        "\\pm",
        "\\mp",
        "\\approx",
        "\\over",
        "\\choose",
    }
    | {"\\sum", "\\prod", "\\int", "\\lim", "\\to", "\\rightarrow", "\\mapsto", "\\rfloor", "\\rceil"}
)
"""Commands that hold an expression together from outside, or that this verifier does not read."""

_END = Token("end", "")


def parse_expression(tokens: Sequence[Token]) -> Node:
    """Return the expression that all the tokens make up. Raises UnreadableError if they make up none."""
    parser = _Parser(tokens)
    node = parser.quotient()
    if parser.next is not _END:
        raise UnreadableError(f"unexpected {parser.next.text!r}")
    return node


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = [*tokens, _END]
        self._position = 0
        self._depth = 0
        self._bars = 0

    @property
    def next(self) -> Token:
        return self._tokens[self._position]

    def _take(self) -> Token:
        token = self.next
        self._position += token is not _END
        return token

    def _accept(self, *texts: str) -> str | None:
        """Take the next token if it is an operator or name with one of these texts."""
        if self.next.kind in ("operator", "name") and self.next.text in texts:
            return self._take().text
        return None

    def _expect(self, text: str) -> None:
        if self._accept(text) is None:
            raise UnreadableError(f"expected {text!r}, found {self.next.text!r}")

    def quotient(self) -> Node:
        """A sum, or two with \\over or \\choose between them, which divide all of a group."""
        top = self.sum()
        if self._accept("\\choose"):
            return Call("binomial", (top, self.sum()))
        return Product((top, Power(self.sum(), MINUS_ONE))) if self._accept("\\over") else top

    def sum(self) -> Node:
        terms = [self._signed_product()]
        while sign := self._accept("+", "-"):
            term = self._signed_product()
            terms.append(negative(term) if sign == "-" else term)
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def _signed_product(self) -> Node:
        minus = False
        while sign := self._accept("+", "-"):
            minus ^= sign == "-"
        return negative(self._product()) if minus else self._product()

    def _product(self) -> Node:
        factors = [self._power()]
        while True:
            if self._accept("*"):
                factors.append(self._signed_power())
            elif self._accept("/"):
                factors.append(Power(self._signed_power(), MINUS_ONE))
            elif self._starts_factor() or (self.next.kind == "number" and _takes_number(factors[-1])):
                factors.append(self._power())
            else:
                return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def _signed_power(self) -> Node:
        minus = False
        while sign := self._accept("+", "-"):
            minus ^= sign == "-"
        return negative(self._power()) if minus else self._power()

    def _starts_factor(self) -> bool:
        """Whether a factor without a sign of multiplication may follow. A number may not: 4 10/3 is no product."""
        token = self.next
        if token.kind == "operator":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self._bars)
        return token.kind == "word" or (token.kind == "name" and token.text not in _STRUCTURAL)

    def _power(self) -> Node:
        base = self._postfix()
        return Power(base, self._exponent()) if self._accept("^") else base

    def _exponent(self) -> Node:
        self._enter()
        minus = False
        while sign := self._accept("+", "-"):
            minus ^= sign == "-"
        exponent = self._power()
        self._depth -= 1
        return negative(exponent) if minus else exponent

    def _postfix(self) -> Node:
        node = self._primary()
        for _ in range(MOST_SUFFIXES):
            if self._accept("!"):
                name = "double_factorial" if self._accept("!") else "factorial"
                node = Call(name, (node,))
            elif self._accept("\\degree"):
                node = Call("degree", (node,))
            elif self._accept("%"):
                node = Product((node, Number(Fraction(1, 100))))
            elif isinstance(node, Symbol) and self._accept("'"):
                node = Symbol(node.name + "'")
            elif isinstance(node, Symbol) and self._accept("_"):
                node = Symbol(f"{node.name}_{self._subscript()}")
            else:
                return node
        raise UnreadableError(f"more than {MOST_SUFFIXES} signs after a value")

    def _subscript(self) -> str:
        if not self._accept("{"):
            return self._take().text
        parts = []
        while not self._accept("}"):
            if self.next is _END:
                raise UnreadableError("a subscript without an end")
            parts.append(self._take().text)
        return "".join(parts)

    def _primary(self) -> Node:
        token = self._take()
        if token.kind == "number":
            return self._number(token.text)
        if token.text in _CLOSERS and token.kind != "word":
            inside = self._group(_CLOSERS[token.text])
            return Call(token.text[2:], (inside,)) if token.text.startswith("\\") else inside
        if token.text == "|":
            return self._absolute()
        if token.kind == "word":
            return Symbol(token.text)
        if token.kind != "name" or token.text in _STRUCTURAL:
            raise UnreadableError(f"unexpected {token.text!r}")
        return self._named(token.text)

    def _named(self, name: str) -> Node:
        if name in _CONSTANTS:
            return Constant(_CONSTANTS[name])
        if name == "\\frac":
            return self._fraction()
        if name == "\\sqrt":
            return self._root()
        if name == "\\binom":
            return Call("binomial", (self._argument(single=True), self._argument()))
        if name in _DECORATIONS:
            return Symbol(f"{name}{self._argument()}")
        if name[1:] in FUNCTIONS:
            return self._function(name[1:])
        if name in APPLIED and self.next.text in ("(", "'"):
            return self._applied(name)
        return Symbol(name)

    def _applied(self, name: str) -> Node:
        """f(x) and f'(x) as a call, as far as that is no product with a variable f."""
        start = self._position
        while self._accept("'"):
            name += "'"
        after = self._tokens[min(self._position + 1, len(self._tokens) - 1)].text
        if self.next.text == "(" and (not name.startswith("P") or after[:1].isupper()):
            self._take()
            return Call(name, (self._group(")"),))
        self._position = start
        return Symbol(name[0])

    def _number(self, text: str) -> Node:
        """A numeral, or a mixed number: an integer directly before a proper fraction, as in 2\\frac{1}{2} or 11 5/6."""
        whole = _numeral(text)
        start = self._position
        if isinstance(whole, Number) and _is_natural(whole):
            top, bottom = self._following_fraction()
            if _is_natural(top) and _is_natural(bottom) and top.value < bottom.value:
                return Number(whole.value + top.value / bottom.value)
        self._position = start
        return whole

    def _following_fraction(self) -> tuple[Node | None, Node | None]:
        """Numerator and denominator of a fraction that comes next, else None twice."""
        if self._accept("\\frac"):
            return self._argument(single=True), self._argument()
        if self.next.kind == "number":
            top = _numeral(self._take().text)
            if self._accept("/") and self.next.kind == "number":
                return top, _numeral(self._take().text)
        return None, None

    def _fraction(self) -> Node:
        top, bottom = self._argument(single=True), self._argument()
        if _is_differential(top) and _is_differential(bottom):
            return Symbol(f"{top}/{bottom}")
        return Product((top, Power(bottom, MINUS_ONE)))

    def _root(self) -> Node:
        index: Node = Number(Fraction(2))
        if self._accept("["):
            index = self._group("]")
        return Call("root", (self._argument(), index))

    def _argument(self, *, single: bool = False) -> Node:
        """What a command without braces takes: a group, or one token; with `single`, one digit of a longer numeral."""
        if self._accept("{"):
            return self._group("}")
        self._enter()
        if single and self.next.kind == "number" and len(self.next.text) > 1 and self.next.text.isdigit():
            digits = self.next.text
            self._tokens[self._position : self._position + 1] = [
                Token("number", digits[0]),
                Token("number", digits[1:]),
            ]
        token = self.next
        if token.kind == "number":
            self._take()
            node: Node = _numeral(token.text)
        else:
            node = self._primary()
        self._depth -= 1
        return node

    def _function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        if name == "log" and self._accept("_"):
            base = self._argument()
        if self._accept("^"):
            power = self._exponent()
        self._enter()
        if self.next.kind == "operator" and self.next.text in ("(", "[", "{", "|"):
            argument = self._postfix()
        else:
            argument = self._bare_argument()
        self._depth -= 1
        if power == MINUS_ONE and f"arc{name}" in FUNCTIONS:
            return Call(f"arc{name}", (argument,))
        call = Call(name, (argument,) if base is None else (argument, base))
        return call if power is None else Power(call, power)

    def _bare_argument(self) -> Node:
        """The factors after a function without brackets, up to the next function: sin 5x cos x is sin(5x) cos(x)."""
        minus = self._accept("-") is not None
        factors = [self._power()]
        while self._starts_factor() and self.next.text not in ("(", "[", "|") and self.next.text[1:] not in FUNCTIONS:
            factors.append(self._power())
        node = factors[0] if len(factors) == 1 else Product(tuple(factors))
        return negative(node) if minus else node

    def _absolute(self) -> Node:
        self._bars += 1
        inside = self._group("|")
        self._bars -= 1
        return Call("abs", (inside,))

    def _group(self, closer: str) -> Node:
        self._enter()
        bars, self._bars = self._bars, int(closer == "|")
        inside = self.quotient() if closer == "}" else self.sum()
        self._expect(closer)
        self._bars = bars
        self._depth -= 1
        return inside

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST_NESTING:
            raise UnreadableError(f"nested deeper than {DEEPEST_NESTING} levels")


def _takes_number(factor: Node) -> bool:
    """Whether a number without a sign may follow as a factor: after 2^3 or 3!, but not after 4 or 1/4."""
    if isinstance(factor, Power):
        return factor.exponent != MINUS_ONE
    return isinstance(factor, Call) and factor.name.endswith("factorial")


def _is_differential(node: Node) -> bool:
    """Whether a node is the dx of dy/dx, which is no quotient of products."""
    return isinstance(node, Product) and len(node.factors) == 2 and node.factors[0] == Symbol("d")


def _is_natural(node: Node | None) -> TypeGuard[Number]:
    """Whether a node is an integer written without a decimal point."""
    return isinstance(node, Number) and node.digits is None and node.value.denominator == 1


def _numeral(text: str) -> Node:
    """The number of a numeral token; one with an exponent is a product, so that its power is bounded like any other."""
    digits, _, exponent = text.lower().partition("e")
    if len(text) > LONGEST_NUMERAL:
        raise UnreadableError(f"a numeral of more than {LONGEST_NUMERAL} digits")
    whole, point, decimals = digits.partition(".")
    significant = len((whole + decimals).lstrip("0")) if point else None
    number = Number(Fraction(int(whole + decimals), 10 ** len(decimals)), significant, len(decimals))
    if not exponent:
        return number
    return Product((number, Power(Number(Fraction(10)), Number(Fraction(int(exponent))))))
