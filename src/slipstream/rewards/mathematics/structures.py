"""From the text of an answer to a value: list, set, tuple, interval, matrix, relation, ratio, words or quantity.

Second stage of the verifier, between `notation.py` and `equivalence.py`. Splits the tokens of an answer at the signs
that hold it together, from the loosest to the tightest; what is left is a scalar for `parser.py`.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from slipstream.rewards.mathematics.expressions import (
    BasedNumber,
    Call,
    Collection,
    Group,
    Matrix,
    Number,
    Product,
    Quantity,
    Ratio,
    Relation,
    Text,
    Union,
    UnreadableError,
    Value,
)
from slipstream.rewards.mathematics.notation import FUNCTIONS, Token, simplify, tokenize
from slipstream.rewards.mathematics.numerals import NUMBER_WORDS, number_in_words
from slipstream.rewards.mathematics.parser import parse_expression
from slipstream.rewards.mathematics.solutions import all_reals, reals_without
from slipstream.rewards.mathematics.units import NO_UNITS, is_currency

Item = TypeVar("Item")

LONGEST_ANSWER = 2000
"""Characters of an answer; a longer one is not read."""

DEEPEST_STRUCTURE = 12
"""Levels of lists in tuples in sets."""

MOST_ITEMS = 64
"""Items of a list, a tuple, a matrix row; comparing unordered lists takes the square of it."""

_OPENERS = {"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"}
_CLOSERS = {")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"}
_SIGNS = {"=": "=", "==": "=", ":=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "\\approx": "approx"}
_TOTALS = {"\\sum", "\\prod", "\\int", "\\lim", "\\max", "\\min"}
"""What may stand before an equals sign without being read: it is what the question asks for."""

_MATRICES = {"matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix", "smallmatrix", "array"}
_ARTICLES = frozenset({"the", "a", "an", "is", "are"})
_LEADS = frozenset(
    {"approximately", "approx", "about", "exactly", "roughly", "\\approx", "\\sim", "only", "usd", "rs", "equals"}
)
"""Words before a number that leave it what it is, but for a currency."""

_SHAPES = {"name": "n", "word": "n", "text": "n", "number": "d"}
_NAME_SHAPE = re.compile(
    r"(?:n'{0,3}(?:_(?:[nd]|\{[nd]{1,6}\}))?){1,5}(?:\((?:[^()]|\([^()]{0,20}\)){0,40}\))?|\|n{1,5}\||\(n(?:,n){1,9}\)"
)
"""What a name looks like: variables with primes and subscripts, perhaps with arguments; a length; a point."""

_UNIT_POWER = r"(?:\^(?:\{-?[123]\}|-?[123]))?"
_UNIT = re.compile(rf"w{_UNIT_POWER}(?:(?:[/*.]n|(?:[/*.]|\{{\}})?w){_UNIT_POWER}){{0,12}}")
"""Shape of a unit: words with exponents, multiplied or divided."""

_CLOCK = re.compile(r"\d{1,2}:(?:0\d|[1-5][05])(?::[0-5]\d)?")
_MERIDIEM = {"": "", "am": "am", "pm": "pm", "oclock": ""}
_MODULUS = re.compile(
    r"\\pmod\s*(?:\{\s*\d{1,9}\s*\}|\d)$|(?:\\text\{\s*)?\((?:\\text\{)?\s*\\?mod\s*\}?\s*\d{1,9}\)\}?$"
)
_BASED = re.compile(
    r"(?P<sign>-?)[{(]?(?P<digits>[A-Z]{0,9}\d[\dA-Za-f]{0,200}|[A-F]{2,200})[})]?_\{?\(?(?P<base>\d{1,2}|[a-z]{3,7})\)?\}?"
)
_REAL_MEMBER = ("", "\\in\\mathbb{R}", "\\in\\mathbbR")
_ALL_REALS = frozenset({"all real number", "all real", "real number", "all real numbers"})


@lru_cache(maxsize=1024)
def value_or_none(answer: str) -> Value | None:
    """Return what an answer means, None if it has no meaning here. The last thousand are remembered."""
    try:
        return read_value(answer)
    except UnreadableError:
        return None


def read_value(answer: str) -> Value:
    """Return what an answer means. Raises UnreadableError for what is neither mathematics nor a few words."""
    if len(answer) > LONGEST_ANSWER:
        raise UnreadableError(f"an answer of more than {LONGEST_ANSWER} characters")
    tokens = tokenize(_MODULUS.sub("", simplify(answer)))
    if not tokens:
        raise UnreadableError("an empty answer")
    return _read(tokens, 0)


def modulus(answer: str) -> int | None:
    """Return the 7 of '5 (mod 7)'; None without."""
    found = _MODULUS.search(simplify(answer[:LONGEST_ANSWER]))
    return int(re.sub(r"\D", "", found.group())) if found else None


def normal_words(text: str) -> str:
    """Return the words of a text in lower case, without LaTeX, punctuation, articles and a plural's s."""
    text = simplify(text[:LONGEST_ANSWER]).replace("\\text", " ").replace("\\", " ").lower()
    text = re.sub(r"\b(?:triangle|angle) ", " ", text)
    words = re.findall(r"[^\W_]+", text.replace("'", ""))
    return " ".join(
        word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words if word not in _ARTICLES
    )


def _read(tokens: Sequence[Token], depth: int) -> Value:
    if depth > DEEPEST_STRUCTURE:
        raise UnreadableError(f"nested deeper than {DEEPEST_STRUCTURE} levels")
    tokens = _unwrapped(tokens, "{")
    if not tokens:
        raise UnreadableError("nothing where a value was expected")
    for reader in (
        _read_list,
        _read_relation,
        _read_union,
        _read_ratio,
        _read_group,
        _read_matrix,
        _read_compound,
        _read_based,
        _read_words,
    ):
        value = reader(tokens, depth)
        if value is not None:
            return value
    return _read_quantity(tokens)


def _read_list(tokens: Sequence[Token], depth: int) -> Value | None:
    parts = _split(tokens, lambda token: token.text in (",", ";") and token.kind == "operator")
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return None if parts and len(parts[0]) == len(tokens) else _read(parts[0] if parts else [], depth + 1)
    items = [item for part in parts for item in _items(_read(part, depth + 1))]
    first = items[0]
    if isinstance(first, Relation) and first.name and not any(isinstance(item, Relation) for item in items[1:]):
        items[0] = first.parts[-1]  # n = 1, 2, 3
    return Collection(_bounded(items), braces=False)


def _read_relation(tokens: Sequence[Token], depth: int) -> Value | None:
    member = _split(tokens, lambda token: token.text == "\\in" and token.kind == "name")
    if len(member) == 2 and all(token.kind == "name" for token in member[0]):
        return _read(member[1], depth + 1)
    parts = _split(tokens, lambda token: token.text in _SIGNS and token.kind in ("operator", "name"))
    if len(parts) < 2:
        return None
    signs = [
        _SIGNS[token.text] for token in _at_top(tokens) if token.text in _SIGNS and token.kind in ("operator", "name")
    ]
    if not parts[0]:
        if set(signs) <= {"=", "approx"}:
            return _read(tokens[1:], depth + 1)
        raise UnreadableError("a relation without a left side")
    if signs == ["="] and [token.kind for token in parts[1]] == ["name"] and _name(parts[0]) is None:
        parts.reverse()  # 5 = x
    name = _name(parts[0])
    if "approx" in signs[1:] or (signs == ["approx"] and name is None):
        cut = signs.index("approx", 1 if len(signs) > 1 else 0)  # what is exact stands before it
        parts, signs = parts[: cut + 1], signs[:cut]
    if not signs:
        return _read(parts[0], depth + 1)
    words = name is not None or parts[0][0].text in _TOTALS
    values = tuple(_named(part) if words and not index else _read(part, depth + 1) for index, part in enumerate(parts))
    return Relation(_bounded(values), tuple("=" if sign == "approx" else sign for sign in signs), name)


def _name(tokens: Sequence[Token]) -> str | None:
    """The text of what names a value: x, x_1, f(x), P(A), AB, 'Area', (x, y); None for anything else."""
    text = "".join(token.text for token in tokens)
    if all(token.kind in ("text", "word") for token in tokens):
        return text
    if any(token.text[1:] in FUNCTIONS for token in tokens):
        return None
    shape = "".join(_SHAPES.get(token.kind, token.text) for token in tokens)
    return text if text not in ("\\pi", "e", "i", "\\infty", "\\not") and _NAME_SHAPE.fullmatch(shape) else None


def _named(tokens: Sequence[Token]) -> Value:
    """The left side of a definition: an expression if it reads as one, else words."""
    try:
        return Quantity(parse_expression(tokens))
    except UnreadableError:
        return Text("".join(token.text for token in tokens))


def _read_union(tokens: Sequence[Token], depth: int) -> Value | None:
    parts = _split(tokens, lambda token: token.text == "\\cup")
    if len(parts) > 1:
        sets = _bounded([_read(part, depth + 1) for part in parts])
        members = [item for each in sets if isinstance(each, Collection) for item in each.items]
        only_members = all(isinstance(each, Collection) for each in sets)
        return Collection(_bounded(members), braces=True) if only_members else Union(sets)
    parts = _split(tokens, lambda token: token.text == "\\setminus")
    if len(parts) == 2:
        whole, left_out = (_read(part, depth + 1) for part in parts)
        if whole != all_reals() or not isinstance(left_out, Collection):
            raise UnreadableError("a difference of other sets than the real numbers and a list")
        return reals_without(left_out.items)
    if len(tokens) == 1 and tokens[0].text == "\\emptyset":
        return Collection((), braces=True)
    if [token.text for token in tokens] in (["\\mathbb", "{", "R", "}"], ["\\mathbb", "R"]):
        return all_reals()
    return None


def _read_ratio(tokens: Sequence[Token], depth: int) -> Value | None:
    parts = _split(tokens, lambda token: token.text == ":")
    if len(parts) < 2:
        return None
    text = "".join(token.text for token in tokens if token.kind in ("number", "operator"))
    meridiem = "".join(re.findall("[a-z]", "".join(token.text for token in parts[-1][1:]).lower()))
    clock = bool(_CLOCK.fullmatch(text.strip(".")) and meridiem in _MERIDIEM) or meridiem in ("am", "pm")
    if clock:
        parts[-1] = parts[-1][:1]
    values = _bounded([_read(part, depth + 1) for part in parts])
    return Ratio(values, clock, _MERIDIEM[meridiem] if clock else "")


def _read_group(tokens: Sequence[Token], depth: int) -> Value | None:
    first, last = tokens[0].text, tokens[-1].text
    if first == "<" and last == ">":
        tokens, first, last = tokens[1:-1], "\\langle", "\\rangle"
        return Group(first, last, _bounded([_read(part, depth + 1) for part in _split(tokens, _is_comma)]))
    if first not in ("(", "[", "\\{", "\\langle") or last not in (")", "]", "\\}", "\\rangle"):
        return None
    if _closing(tokens) != len(tokens) - 1:
        return None
    inside = tokens[1:-1]
    if first == "\\{":
        described = _split(inside, lambda token: token.text in ("\\mid", "|", ":"))
        member = "".join(token.text for token in described[0][1:])
        if len(described) == 2 and described[0][:1] and described[0][0].kind == "name" and member in _REAL_MEMBER:
            return _read(described[1], depth + 1)  # the set of all x with this property
        parts = [part for part in _split(inside, _is_comma) if part]
        return Collection(_bounded([item for part in parts for item in _items(_read(part, depth + 1))]), braces=True)
    parts = _split(inside, _is_comma)
    if len(parts) == 1:
        whole_scalar = (first, last) in (("(", ")"), ("[", "]")) and not _has_structure(inside)
        return None if whole_scalar else _read(inside, depth + 1)
    return Group(first, last, _bounded([_read(part, depth + 1) for part in parts]))


def _is_comma(token: Token) -> bool:
    return token.kind == "operator" and token.text in (",", ";")


def _has_structure(tokens: Sequence[Token]) -> bool:
    """Whether there is more in brackets than a scalar: (\\begin{pmatrix}...), (C)."""
    return any(token.kind in ("environment", "text", "word") or token.text in _SIGNS for token in tokens)


def _read_matrix(tokens: Sequence[Token], depth: int) -> Value | None:
    first, last = tokens[0], tokens[-1]
    if last.kind != "environment":
        return None
    if first.kind != "environment":
        return _read_scaled_matrix(tokens, depth)
    name = first.text.partition("{")[2].rstrip("}")
    if name not in _MATRICES or last.text != f"\\end{{{name}}}":
        raise UnreadableError(f"an environment {name} that is no matrix")
    body = list(tokens[1:-1])
    if any(token.kind == "environment" for token in body):
        raise UnreadableError("a matrix in a matrix")
    if name == "array" and body and body[0].text == "{":
        body = body[_closing(body) + 1 :]
    rows = [_split(row, lambda token: token.text == "&") for row in _split(body, lambda token: token.text == "\\\\")]
    rows = [row for row in rows if row != [[]]]
    if not rows or len({len(row) for row in rows}) != 1:
        raise UnreadableError("a matrix whose rows differ in length")
    values = [_bounded([_read(cell, depth + 1) for cell in row]) for row in rows]
    return Matrix(_bounded(values), determinant=name in ("vmatrix", "Vmatrix"))


def _read_scaled_matrix(tokens: Sequence[Token], depth: int) -> Value | None:
    """A matrix with a factor before it: \\frac{1}{2}\\begin{pmatrix}..., -\\begin{pmatrix}..."""
    start = next(index for index, token in enumerate(tokens) if token.kind == "environment")
    factor = list(tokens[: start - (tokens[start - 1].text == "*")])
    matrix = _read_matrix(tokens[start:], depth)
    if not isinstance(matrix, Matrix) or matrix.determinant:
        return None
    scale = parse_expression([*factor, Token("number", "1")] if factor[-1].text == "-" else factor)
    rows = [[cell.expression for cell in row if isinstance(cell, Quantity)] for row in matrix.rows]
    if any(len(row) != len(matrix.rows[0]) for row in rows):
        raise UnreadableError("a factor of what is no number")
    return Matrix(tuple(tuple(Quantity(Product((scale, cell))) for cell in row) for row in rows))


def _read_compound(tokens: Sequence[Token], depth: int) -> Value | None:
    """5 feet 3 inches: a list of quantities, each with its unit."""
    kinds = ["w" if token.kind in ("text", "word", "name") else token.kind for token in tokens]
    if len(kinds) < 4 or tokens[1].kind == "name" or kinds != ["number", "w"] * (len(kinds) // 2):
        return None
    pairs = [tokens[start : start + 2] for start in range(0, len(tokens), 2)]
    return Collection(_bounded([_read(pair, depth + 1) for pair in pairs]), braces=False)


def _read_based(tokens: Sequence[Token], depth: int) -> Value | None:
    """2516_8, -37_8, A5_{11}: digits that are all less than the base."""
    text = "".join(token.text for token in tokens)
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    sign, digits = match["sign"], match["digits"].upper()
    base = int(match["base"]) if match["base"].isdigit() else int(number_in_words(match["base"]) or 0)
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return BasedNumber(sign, digits.lstrip("0") or "0", base)


def _read_words(tokens: Sequence[Token], depth: int) -> Value | None:
    """Words without a number or an operator between them."""
    if not any(token.kind in ("word", "text") for token in tokens):
        return None
    if any(
        token.kind == "number" or token.text in ("+", "*", "^", "=", "\\frac", "\\sqrt", "\\pi") for token in tokens
    ):
        return None
    words = normal_words(" ".join(token.text for token in tokens))
    number = number_in_words(words)
    if number is not None:
        return Quantity(Number(number))
    if words in _ALL_REALS:
        return all_reals()
    if words in ("empty", "empty set", "null set"):
        return Collection((), braces=True)
    if not words:
        raise UnreadableError("no word and no number")
    return Text(words)


def _read_quantity(tokens: Sequence[Token]) -> Value:
    """A scalar with an optional unit: trailing words with exponents and quotients, a currency, or a degree sign."""
    lead = len(tokens) - len(_without_lead(tokens))
    currency = next((token.text for token in tokens[:lead] if is_currency(token.text)), None)
    tokens = tokens[lead:]
    start = _unit_start(tokens)
    if start == len(tokens) and len(tokens) > 3 and [tokens[-3].text, tokens[-1].text] == ["(", ")"]:
        bracketed = tokens[-2]  # 5 (cm)
        tokens = [*tokens[:-3], bracketed] if bracketed.kind in ("text", "word") else tokens
        start = _unit_start(tokens)
    words = _words(tokens[start:])
    if (words | {word.removesuffix("s") for word in words}) & (NO_UNITS | NUMBER_WORDS.keys()):
        raise UnreadableError("words after a number that make it another, or deny it")
    scalar, unit = tokens[:start], " ".join(token.text for token in tokens[start:]) or currency
    if len(scalar) > 2 and scalar[-2].text == "\\degree" and scalar[-1].text in ("C", "F"):
        scalar, unit = scalar[:-1], scalar[-1].text
    percent = len(scalar) > 1 and scalar[-1].text == "%"
    if percent:
        scalar = scalar[:-1]
    if plus_minus := next((token.text for token in scalar if token.text in ("\\pm", "\\mp")), None):
        return Collection((_choose(scalar, plus_minus, "+"), _choose(scalar, plus_minus, "-")), braces=False)
    expression = parse_expression(_unwrapped(scalar))
    if isinstance(expression, Call) and expression.name == "degree":
        expression, unit = expression.arguments[0], unit or "degree"
    return Quantity(expression, unit, percent)


def _words(tokens: Sequence[Token]) -> set[str]:
    texts = [token.text.lower() for token in tokens if token.kind in ("text", "word")]
    return {word.strip(".:()") for text in texts for word in text.split()}


def _without_lead(tokens: Sequence[Token]) -> Sequence[Token]:
    """Tokens without 'approximately', 'about' or a currency before the value."""
    start = 0
    while start < len(tokens) - 1 and _is_lead(tokens[start]):
        start += 1
    return tokens[start:]


def _is_lead(token: Token) -> bool:
    """Whether a word changes nothing: 'about', a currency, or a title that ends with a colon."""
    word = token.text.lower().rstrip(". ")
    is_title = token.kind == "text" and word.endswith(":") and not _words([token]) & NO_UNITS
    return word in _LEADS or is_currency(word) or is_title


def _unit_start(tokens: Sequence[Token]) -> int:
    """Where the unit begins: the first word after the number from which on there is nothing but words and powers."""
    start = next((index for index, token in enumerate(tokens) if index and token.kind in ("text", "word")), len(tokens))
    shape = "".join({"text": "w", "word": "w", "name": "n"}.get(token.kind, token.text) for token in tokens[start:])
    return start if _UNIT.fullmatch(shape) else len(tokens)


def _choose(tokens: Sequence[Token], sign: str, chosen: str) -> Value:
    other = "-" if chosen == "+" else "+"
    swapped = [
        Token("operator", chosen if token.text == sign else other) if token.text in ("\\pm", "\\mp") else token
        for token in tokens
    ]
    return Quantity(parse_expression(swapped))


def _items(value: Value) -> tuple[Value, ...]:
    """A list within a list, as of plus-minus, is part of it."""
    return value.items if isinstance(value, Collection) and not value.braces else (value,)


def _bounded(items: Sequence[Item]) -> tuple[Item, ...]:
    if len(items) > MOST_ITEMS:
        raise UnreadableError(f"more than {MOST_ITEMS} items")
    return tuple(items)


def _unwrapped(tokens: Sequence[Token], openers: str = "([{") -> Sequence[Token]:
    """Tokens without brackets around all of them, however many."""
    closing = _matches(tokens)
    start, last = 0, len(tokens) - 1
    while start < last - start and closing.get(start) == last - start and tokens[start].text in openers:
        start += 1
    return tokens[start : len(tokens) - start]


def _matches(tokens: Sequence[Token]) -> dict[int, int]:
    """Position of the closing bracket of each opening one. Kinds may differ, as in [0, 1)."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for position, token in enumerate(tokens):
        if token.text in _OPENERS or token.text.startswith("\\begin{"):
            opened.append(position)
        elif opened and (token.text in _CLOSERS or token.text.startswith("\\end{")):
            closing[opened.pop()] = position
    return closing


def _closing(tokens: Sequence[Token]) -> int:
    return _matches(tokens).get(0, -1)


def _split(tokens: Sequence[Token], is_separator: Callable[[Token], bool]) -> list[list[Token]]:
    """Cut tokens at the separators that are in no bracket."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += _step(token)
        if depth == 0 and is_separator(token):
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _at_top(tokens: Sequence[Token]) -> list[Token]:
    """The tokens that are in no bracket."""
    top: list[Token] = []
    depth = 0
    for token in tokens:
        depth += _step(token)
        if depth == 0:
            top.append(token)
    return top


def _step(token: Token) -> int:
    if token.text in _OPENERS or token.text.startswith("\\begin{"):
        return 1
    return -1 if token.text in _CLOSERS or token.text.startswith("\\end{") else 0
