"""Inequalities in one variable as the sets they describe: x > 5 is (5, \\infty).

Only what is linear with rational coefficients, or has the variable alone on one side, is turned into a set; everything
else stays the relation it is.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from slipstream.rewards.mathematics.equality import infinity_sign, symbols
from slipstream.rewards.mathematics.evaluation import TooLargeError, UndefinedError, exact_value
from slipstream.rewards.mathematics.expressions import (
    Call,
    Collection,
    Constant,
    Group,
    Node,
    Number,
    Quantity,
    Relation,
    Symbol,
    Union,
    UnreadableError,
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


def all_reals() -> Group:
    """Return the interval of all real numbers."""
    infinity = Constant("infinity")
    return Group("(", ")", (Quantity(negative(infinity)), Quantity(infinity)))


def reals_without(left_out: Sequence[Value]) -> Union:
    """Return the intervals between points that are left out: (-\\infty, 1), (1, 2), (2, \\infty).

    Raises UnreadableError for points that are no rational numbers, of which there is more than one.
    """
    nodes = [point.expression for point in left_out if isinstance(point, Quantity)]
    if len(nodes) != len(left_out) or not nodes:
        raise UnreadableError("points that are no numbers")
    if len(nodes) > 1:
        values = [exact_or_none(node) for node in nodes]
        order = sorted((value, index) for index, value in enumerate(values) if value is not None)
        if len(order) != len(nodes):
            raise UnreadableError("points whose order is not known")
        nodes = [nodes[index] for _, index in order]
    infinity = Constant("infinity")
    ends = [negative(infinity), *nodes, infinity]
    return Union(tuple(Group("(", ")", (Quantity(left), Quantity(right))) for left, right in pairwise(ends)))


def exact_or_none(node: Node) -> Fraction | None:
    """Return the value of a constant if it is rational and can be computed."""
    try:
        return exact_value(node, {})
    except (TooLargeError, UndefinedError):
        return None


def solution_set(value: Value) -> tuple[str, Value] | None:
    """Return the variable and the set of an inequality, of a chain such as -2 <= x < 7, or of several joined by 'or'.

    None for everything else.
    """
    if isinstance(value, Collection) and not value.braces and value.items:
        sets = [solution_set(item) if isinstance(item, Relation) else None for item in value.items]
        found = [each for each in sets if each is not None]
        if len(found) < len(sets) or len({variable for variable, _ in found}) > 1:
            return None
        joined = _left_out(value.items) or _between([each for _, each in found])
        if joined is not None:
            return found[0][0], joined
        items = [item for _, each in found for item in (each.items if isinstance(each, Union) else (each,))]
        return found[0][0], Union(tuple(items))
    if not isinstance(value, Relation) or not set(value.signs) <= INEQUALITIES:
        return None
    nodes = [part.expression for part in value.parts if isinstance(part, Quantity)]
    if len(nodes) != len(value.parts) or len(nodes) > 3:
        return None
    if len(nodes) == 2 and (absolute := _absolute(nodes, value.signs[0])):
        return absolute
    lines = [_half_line(left, sign, right) for left, sign, right in zip(nodes, value.signs, nodes[1:], strict=False)]
    return _intersection([line for line in lines if line is not None]) if None not in lines else None


def _left_out(relations: Sequence[Value]) -> Union | None:
    """All numbers but those that x \\ne 1 and x \\ne 2 name; None if there is another inequality."""
    if any(not isinstance(each, Relation) or each.signs != ("!=",) or each.name is None for each in relations):
        return None
    return reals_without([each.parts[1] for each in relations if isinstance(each, Relation)])


def _between(sets: Sequence[Value]) -> Group | None:
    """What x > -4 and x < 2 have in common: where two half lines cover everything, nobody means their union."""
    if len(sets) != 2 or not all(isinstance(each, Group) for each in sets):
        return None
    groups = sorted((each for each in sets if isinstance(each, Group)), key=_is_bounded_above)
    (lower, end), (start, upper) = (each.items for each in groups)
    ends = [
        item.expression if isinstance(item, Quantity) else Constant("infinity") for item in (lower, end, start, upper)
    ]
    if infinity_sign(ends[1]) is None or infinity_sign(ends[2]) is None:
        return None
    values = [exact_or_none(ends[0]), exact_or_none(ends[3])]
    if values[0] is None or values[1] is None or values[0] >= values[1]:
        return None
    return Group(groups[0].left, groups[1].right, (lower, upper))


def _is_bounded_above(group: Group) -> bool:
    last = group.items[-1]
    return not (isinstance(last, Quantity) and infinity_sign(last.expression) is not None)


def _absolute(nodes: Sequence[Node], sign: str) -> tuple[str, Value] | None:
    """|x - 1| < 2 as -1 < x < 3, and |x - 1| > 2 as the two rays outside of it, for a positive right side."""
    inside, bound = nodes
    if not isinstance(inside, Call) or inside.name != "abs" or symbols(bound) or sign == "!=":
        return None
    value = exact_or_none(bound)
    if value is None or value <= 0:
        return None
    lines = [
        _half_line(inside.arguments[0], sign, bound),
        _half_line(inside.arguments[0], FLIPPED[sign], negative(bound)),
    ]
    found = [line for line in lines if line is not None]
    if len(found) < 2:
        return None
    if sign in ("<", "<="):
        return _intersection(found)
    rays = [ray for ray in (_intersection([line]) for line in found) if ray is not None]
    return rays[0][0], Union(tuple(ray for _, ray in rays))


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
