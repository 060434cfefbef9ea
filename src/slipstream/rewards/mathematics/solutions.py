"""Inequalities in one variable as the sets they describe: x > 5 is (5, \\infty).

Only what is linear with rational coefficients, or has the variable alone on one side, is turned into a set; everything
else stays the relation it is.
"""

from fractions import Fraction
from typing import NamedTuple

from slipstream.rewards.mathematics.equality import infinity_sign, symbols
from slipstream.rewards.mathematics.evaluation import TooLargeError, UndefinedError, exact_value
from slipstream.rewards.mathematics.expressions import (
    Collection,
    Constant,
    Group,
    Node,
    Number,
    Quantity,
    Relation,
    Symbol,
    Union,
    Value,
    difference,
    negative,
)

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
INEQUALITIES = frozenset({"<", ">", "<=", ">=", "!="})


class HalfLine(NamedTuple):
    """What one inequality says of its variable: `variable` `sign` `bound`."""

    variable: str
    sign: str
    bound: Node


def solution_set(value: Value) -> tuple[str, Value] | None:
    """Return the variable and the set of an inequality, of a chain such as -2 <= x < 7, or of several joined by 'or'.

    None for everything else.
    """
    if isinstance(value, Collection) and not value.braces and value.items:
        sets = [solution_set(item) if isinstance(item, Relation) else None for item in value.items]
        found = [each for each in sets if each is not None]
        if len(found) < len(sets) or len({variable for variable, _ in found}) > 1:
            return None
        items = [item for _, each in found for item in (each.items if isinstance(each, Union) else (each,))]
        return found[0][0], Union(tuple(items))
    if not isinstance(value, Relation) or not set(value.signs) <= INEQUALITIES:
        return None
    nodes = [part.expression for part in value.parts if isinstance(part, Quantity)]
    if len(nodes) != len(value.parts) or len(nodes) > 3:
        return None
    lines = [_half_line(left, sign, right) for left, sign, right in zip(nodes, value.signs, nodes[1:], strict=False)]
    return _intersection([line for line in lines if line is not None]) if None not in lines else None


def _half_line(left: Node, sign: str, right: Node) -> HalfLine | None:
    names = symbols(left) | symbols(right)
    if len(names) != 1:
        return None
    (name,) = names
    if isinstance(left, Symbol) and not symbols(right):
        return HalfLine(name, sign, right)
    if isinstance(right, Symbol) and not symbols(left):
        return HalfLine(name, FLIPPED[sign], left)
    try:
        values = [exact_value(difference(left, right), {name: Fraction(at)}) for at in (0, 1, 2)]
    except (TooLargeError, UndefinedError):
        return None
    zero, one, two = values
    if zero is None or one is None or two is None or two - one != one - zero or one == zero:
        return None
    return HalfLine(name, sign if one > zero else FLIPPED[sign], Number(-zero / (one - zero)))


def _intersection(lines: list[HalfLine]) -> tuple[str, Value] | None:
    infinity = Constant("infinity")
    lower: Node = negative(infinity)
    upper: Node = infinity
    left, right = "(", ")"
    if not lines or len({line.variable for line in lines}) > 1:
        return None
    if lines[0].sign == "!=":
        bound = Quantity(lines[0].bound)
        rays = Group("(", ")", (Quantity(lower), bound)), Group("(", ")", (bound, Quantity(upper)))
        return (lines[0].variable, Union(rays)) if len(lines) == 1 else None
    for line in lines:
        if line.sign in (">", ">="):
            if infinity_sign(lower) is None:
                return None
            lower, left = line.bound, "[" if line.sign == ">=" else "("
        else:
            if infinity_sign(upper) is None:
                return None
            upper, right = line.bound, "]" if line.sign == "<=" else ")"
    return lines[0].variable, Group(left, right, (Quantity(lower), Quantity(upper)))
