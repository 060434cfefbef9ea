"""What an answer is made of: scalar expressions, and the structures that hold them.

Plain frozen data. `parser.py` builds expressions, `structures.py` the rest; nothing here computes.
"""

from dataclasses import dataclass, replace
from fractions import Fraction


class UnreadableError(Exception):
    """A text is not mathematics that this verifier reads."""


@dataclass(frozen=True)
class Number:
    """A rational number. One written with a decimal point has `digits` significant digits, `places` after the point."""

    value: Fraction
    digits: int | None = None
    places: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable, with its subscript."""

    name: str


@dataclass(frozen=True)
class Constant:
    """pi, e, i or infinity."""

    name: str


@dataclass(frozen=True)
class Sum:
    """Terms that are added."""

    terms: tuple["Node", ...]


@dataclass(frozen=True)
class Product:
    """Factors that are multiplied; a quotient has the divisor as a power with exponent -1."""

    factors: tuple["Node", ...]


@dataclass(frozen=True)
class Power:
    """A base to an exponent."""

    base: "Node"
    exponent: "Node"


@dataclass(frozen=True)
class Call:
    """A known function of one or two arguments: sin, log (argument, base), root (radicand, index), factorial, ..."""

    name: str
    arguments: tuple["Node", ...]


Node = Number | Symbol | Constant | Sum | Product | Power | Call

APPLIED = frozenset({"f", "g", "P"})
"""Names of unknown functions: f(x + 1) is no product. P(A) is one only of events, whose names are capitals."""

MINUS_ONE = Number(Fraction(-1))


def negative(node: Node) -> Node:
    """Return the node with the opposite sign."""
    return replace(node, value=-node.value) if isinstance(node, Number) else Product((MINUS_ONE, node))


def difference(left: Node, right: Node) -> Node:
    """Return left - right."""
    return Sum((left, negative(right)))


@dataclass(frozen=True)
class Quantity:
    """An expression, with the unit it was written with (as text, None without) and whether a percent sign followed."""

    expression: Node
    unit: str | None = None
    percent: bool = False


@dataclass(frozen=True)
class BasedNumber:
    """Digits with the base they are written in, such as 2516_8."""

    sign: str
    digits: str
    base: int


@dataclass(frozen=True)
class Text:
    """Words: lower case, without punctuation and articles."""

    words: str


@dataclass(frozen=True)
class Group:
    """Values in brackets, ordered: a tuple, a point, an interval or a vector. Brackets are ( [ or ⟨, with ) ] or ⟩."""

    left: str
    right: str
    items: tuple["Value", ...]


@dataclass(frozen=True)
class Collection:
    """Values without an order; `braces` tells a set in braces from a bare list."""

    items: tuple["Value", ...]
    braces: bool


@dataclass(frozen=True)
class Union:
    """Sets joined by a union sign."""

    items: tuple["Value", ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of values; a column vector has rows of one."""

    rows: tuple[tuple["Value", ...], ...]
    determinant: bool = False


@dataclass(frozen=True)
class Relation:
    """Values with relation signs between them: = < > <= >= !=. `name` is the first part if it is one, as in x = 5."""

    parts: tuple["Value", ...]
    signs: tuple[str, ...]
    name: str | None = None


@dataclass(frozen=True)
class Ratio:
    """Numbers with colons between them; `clock` where it is a time of day, `meridiem` its am or pm, if it says so."""

    parts: tuple["Value", ...]
    clock: bool
    meridiem: str = ""


Value = Quantity | BasedNumber | Text | Group | Collection | Union | Matrix | Relation | Ratio
