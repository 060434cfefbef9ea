"""Reads formulas written as Python writes them: numbers, names, calls, + - * / ** and brackets.

Stands in for parsers that evaluate, such as sympy's `parse_expr`. What a formula means is given by an `Algebra`, so
that nothing can be called, looked up or computed that is not listed there. Depth, length and numerals are bounded.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

LONGEST_FORMULA = 2000
"""Characters; longer ones are refused. No answer that is meant as one comes near."""

LONGEST_NUMERAL = 40
DEEPEST_FORMULA = 60
"""Levels of brackets, signs and exponents."""

LARGEST_EXPONENT = 100
LARGEST_POWER_BITS = 20_000
"""Bounds that are checked before a power of numbers is computed."""

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|([A-Za-z_]\w*)|(\*\*|[-+*/(),]))", re.ASCII)


@dataclass(frozen=True)
class Algebra:
    """What numerals, names, functions and powers stand for; + - * / are the values' own."""

    number: Callable[[str], Any]
    name: Callable[[str], Any]
    power: Callable[[Any, Any], Any]
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def read_formula(text: str, algebra: Algebra) -> Any:
    """Return the value of a formula. Raises ValueError if it is none, and what the algebra raises."""
    if len(text) > LONGEST_FORMULA:
        raise ValueError(f"a formula of {len(text)} characters, more than {LONGEST_FORMULA}")
    reader = _Reader(_tokens(text), algebra)
    value = reader.sum()
    if reader.next:
        raise ValueError(f"unexpected {reader.next!r}")
    return value


def exact_number(text: str) -> Fraction:
    """Return the value of an arithmetic expression. Raises ValueError or ZeroDivisionError if it has none."""
    value: Fraction = read_formula(text, ARITHMETIC)
    return value


def _tokens(text: str) -> list[str]:
    tokens = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or (match[1] and len(match[1]) > LONGEST_NUMERAL):
            raise ValueError(f"unexpected {text[position : position + 20]!r}")
        tokens.append(match[match.lastindex or 0])
        position = match.end()
    return tokens


class _Reader:
    """Recursive descent; each method reads one level of precedence."""

    def __init__(self, tokens: list[str], algebra: Algebra) -> None:
        self._tokens = [*tokens, ""]
        self._position = 0
        self._depth = 0
        self._algebra = algebra

    @property
    def next(self) -> str:
        """The token to be read; empty at the end."""
        return self._tokens[self._position]

    def sum(self) -> Any:
        value = self._product()
        while self.next in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Any:
        value = self._signed()
        while self.next in ("*", "/"):
            value = value * self._signed() if self._take() == "*" else value / self._signed()
        return value

    def _signed(self) -> Any:
        self._depth += 1
        if self._depth > DEEPEST_FORMULA:
            raise ValueError(f"more than {DEEPEST_FORMULA} levels")
        if self.next in ("+", "-"):
            value = self._signed() if self._take() == "+" else -self._signed()
        else:
            value = self._atom()
            if self.next == "**":
                self._take()
                value = self._algebra.power(value, self._signed())
        self._depth -= 1
        return value

    def _atom(self) -> Any:
        token = self._take()
        if token == "(":
            value = self.sum()
            self._expect(")")
            return value
        if token[:1].isdigit() or token[:1] == ".":
            return self._algebra.number(token)
        if not token or not (token[0].isalpha() or token[0] == "_"):
            raise ValueError(f"unexpected {token or 'end'!r}")
        if self.next != "(":
            return self._algebra.name(token)
        if token not in self._algebra.functions:
            raise ValueError(f"{token!r} is no function known here")
        self._take()
        arguments = [self.sum()]
        while self.next == ",":
            self._take()
            arguments.append(self.sum())
        self._expect(")")
        return self._algebra.functions[token](*arguments)

    def _take(self) -> str:
        token = self.next
        self._position += bool(token)
        return token

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise ValueError(f"expected {token!r}")


def _no_name(name: str) -> Any:
    raise ValueError(f"{name!r} is no number")


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) > LARGEST_EXPONENT or bits * abs(exponent) > LARGEST_POWER_BITS:
        raise ValueError("a power that is not exact, or too large")
    return Fraction(base ** int(exponent))


ARITHMETIC = Algebra(number=Fraction, name=_no_name, power=_exact_power)
"""Exact numbers and nothing else."""
