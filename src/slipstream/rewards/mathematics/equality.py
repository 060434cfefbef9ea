"""Whether two scalar expressions are the same number or the same function of their variables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any

from slipstream.rewards.mathematics.evaluation import (
    CONTEXT,
    PRECISE,
    TooLargeError,
    UndefinedError,
    exact_value,
    numeric_value,
)
from slipstream.rewards.mathematics.expressions import (
    Call,
    Constant,
    Node,
    Number,
    Power,
    Product,
    Sum,
    Symbol,
)

FEWEST_PLACES = 6
"""Digits after the point of a decimal that may stand for a value with no end: 0.333333 for 1/3, but not 0.33."""

FLOAT_DIGITS = 15
"""Significant digits from which on a decimal is taken for the print of a float, exact to 1 part in 10^14."""

POINTS = 4
ATTEMPTS = 12
"""Points at which functions are compared, and points tried, since one may not be defined everywhere."""

SCALES = (1, 1, 300, 20)
"""Factors of the points, in turn: |x - 5| is 5 - x near 0."""

SAME = CONTEXT.mpf(10) ** -25
NOISE = CONTEXT.mpf(10) ** -55
VANISHING = CONTEXT.mpf(10) ** -30
"""Relative difference of equal values, that of rounding alone, and size below which a value may be a lost 0."""

MOST_SYMBOLS = 12

Point = Mapping[str, Fraction]


def same_expression(left: Node, right: Node) -> bool:
    """Return whether two expressions have the same value, at every point where both are looked at.

    Values too large to compute are equal only if they are written with the same tree.
    """
    if left == right:
        return not undefined_constant(left)
    names = symbols(left) | symbols(right)
    if len(names) > MOST_SYMBOLS:
        return False
    infinite = infinity_sign(left), infinity_sign(right)
    if infinite != (None, None):
        return infinite[0] == infinite[1]
    tolerance = decimal_tolerance(left, right)
    if not names:
        return _same_at(left, right, {}, tolerance) is True
    return same_everywhere(lambda point: _same_at(left, right, point, tolerance), names)


def same_everywhere(compare: Callable[[Point], bool | None], names: frozenset[str]) -> bool:
    """Return whether a comparison holds at several points. It gives None where neither side is defined."""
    agreed = 0
    for point in points(names):
        outcome = compare(point)
        if outcome is False:
            return False
        agreed += outcome is True
        if agreed == POINTS:
            return True
    return agreed >= 2


def points(names: frozenset[str]) -> Iterator[Point]:
    """Yield rational values for the variables: positive ones first, then of both signs. The same in every process."""
    for attempt in range(ATTEMPTS):
        point = {}
        for name in sorted(names):
            random = Random(f"{name} {attempt}")
            value = Fraction(random.randint(400, 3999), random.choice((997, 1009, 1013)))
            value *= SCALES[attempt % len(SCALES)]
            point[name] = -value if attempt % 2 and random.random() < 0.7 else value
        yield point


def symbols(node: Node) -> frozenset[str]:
    """Return the names of the variables of an expression."""
    match node:
        case Symbol(name=name):
            return frozenset({name})
        case Sum(terms=nodes) | Product(factors=nodes) | Call(arguments=nodes):
            return frozenset().union(*(symbols(each) for each in nodes))
        case Power(base=base, exponent=exponent):
            return symbols(base) | symbols(exponent)
        case _:
            return frozenset()


def infinity_sign(node: Node) -> int | None:
    """Return 1 or -1 for infinity with this sign, None for everything else."""
    match node:
        case Constant(name="infinity"):
            return 1
        case Product(factors=(Number(value=value), Constant(name="infinity"))) if value:
            return 1 if value > 0 else -1
        case _:
            return None


def decimal_tolerance(left: Node, right: Node) -> Fraction:
    """Return the relative difference that decimals allow, 0 where the comparison is exact.

    A decimal with enough digits may stand for a value without an end; a print of a float may differ in its last digits.
    """
    decimals = [_decimals(node) for node in (left, right)]
    written = [number for numbers in decimals for number in numbers]
    digits = max((min(number.digits or 0 for number in numbers) for numbers in decimals if numbers), default=0)
    if digits >= FLOAT_DIGITS:
        return Fraction(1, 10 ** (FLOAT_DIGITS - 1))
    if not written or all(decimals) or min(number.places for number in written) < FEWEST_PLACES:
        return Fraction(0)
    alone = left if decimals[0] else right
    if isinstance(alone, Number):  # one unit of its last place: rounded or cut
        return Fraction(1, 10**alone.places) / abs(alone.value)
    return Fraction(1, 10 ** (digits - 1))


def _decimals(node: Node) -> list[Number]:
    """The numbers that are written with a point and are not integers."""
    match node:
        case Number(value=value, digits=int()) if value.denominator != 1:
            return [node]
        case Sum(terms=nodes) | Product(factors=nodes) | Call(arguments=nodes):
            return [number for each in nodes for number in _decimals(each)]
        case Power(base=base, exponent=exponent):
            return _decimals(base) + _decimals(exponent)
        case _:
            return []


def undefined_constant(node: Node) -> bool:
    """Return whether a constant has no value, such as 1/0; one that is too large to compute has one."""
    if symbols(node) or infinity_sign(node) is not None:
        return False
    try:
        if exact_value(node, {}) is None:
            numeric_value(node, {})
    except UndefinedError:
        return True
    except TooLargeError:
        return False
    return False


def _same_at(left: Node, right: Node, point: Point, tolerance: Fraction) -> bool | None:
    """Whether two values are equal at a point; None if neither is defined there."""
    try:
        exact = _exact_pair(left, right, point)
        if exact is not None:
            return _same_fraction(*exact, tolerance)
        values = [_value_or_none(node, point, CONTEXT) for node in (left, right)]
        if values[0] is None or values[1] is None:
            return None if values[0] is values[1] else False
        if point and _leaves_the_reals(values) and not (_has_i(left) or _has_i(right)):
            return None
        if _close(values[0], values[1], tolerance):
            gap = values[0] - values[1]
            is_noise = abs(gap) <= NOISE * abs(values[0])
            return is_noise or bool(tolerance) or _vanishes(left, right, point, gap)
        if max(abs(values[0]), abs(values[1])) > VANISHING:
            return False
        return _vanishes(left, right, point, values[0] - values[1])
    except TooLargeError:
        return None if point else False


def _vanishes(left: Node, right: Node, point: Point, gap: Any) -> bool:
    """Whether a small difference is the rounding of 60 digits: with 180 it is smaller still, a real one remains."""
    precise = numeric_value(left, point, PRECISE) - numeric_value(right, point, PRECISE) if gap else 0
    return bool(abs(precise) <= SAME * abs(gap))


def _leaves_the_reals(values: Sequence[Any]) -> bool:
    """Whether both values are complex: where neither expression names i, that is outside of their domain."""
    return all(abs(CONTEXT.im(value)) > SAME * abs(value) for value in values)


def _has_i(node: Node) -> bool:
    match node:
        case Constant(name="i") | Call(name="cis"):
            return True
        case Sum(terms=nodes) | Product(factors=nodes) | Call(arguments=nodes):
            return any(map(_has_i, nodes))
        case Power(base=base, exponent=exponent):
            return _has_i(base) or _has_i(exponent)
        case _:
            return False


def _exact_pair(left: Node, right: Node, point: Point) -> tuple[Fraction, Fraction] | None:
    try:
        first = exact_value(left, point)
        second = None if first is None else exact_value(right, point)
    except UndefinedError:
        return None
    return None if first is None or second is None else (first, second)


def _same_fraction(first: Fraction, second: Fraction, tolerance: Fraction) -> bool:
    """Equal, or within the tolerance where one of the fractions has no end.

    Where both have one, a rounded decimal is another number, but for the noise of a float.
    """
    if first == second:
        return True
    ends = _has_end(first) and _has_end(second)
    limit = min(tolerance, Fraction(1, 10 ** (FLOAT_DIGITS - 1))) if ends else tolerance
    return abs(first - second) < limit * max(abs(first), abs(second))


def _has_end(value: Fraction) -> bool:
    """Whether a fraction has a finite decimal expansion of reasonable length."""
    return 10**40 % value.denominator == 0


def _value_or_none(node: Node, point: Point, context: Any) -> Any | None:
    try:
        return numeric_value(node, point, context)
    except UndefinedError:
        return None


def _close(first: Any, second: Any, tolerance: Fraction) -> bool:
    limit = max(CONTEXT.mpf(tolerance.numerator) / tolerance.denominator, SAME)
    return bool(abs(first - second) <= limit * max(abs(first), abs(second)))


def proportional(left: Node, right: Node) -> int | None:
    """Return 1 or -1, the sign of c, if left = c * right everywhere with a constant c other than 0, else None."""
    names = symbols(left)
    if names != symbols(right) or not names or len(names) > MOST_SYMBOLS:
        return None
    for base in points(names):
        try:
            ratio = _ratio(left, right, base)
        except (TooLargeError, UndefinedError):
            continue
        if ratio is None:
            continue
        return (1 if ratio > 0 else -1) if _same_scaled(left, right, ratio, names) else None
    return None


def _same_scaled(left: Node, right: Node, ratio: Any, names: frozenset[str]) -> bool:
    """Whether left = ratio * right everywhere; exactly, if the ratio is a fraction."""
    tolerance = decimal_tolerance(left, right)
    if isinstance(ratio, Fraction):
        scaled = Product((Number(ratio), right))
        return same_everywhere(lambda point: _same_at(left, scaled, point, tolerance), names)

    def compare(point: Point) -> bool | None:
        first, second = _value_or_none(left, point, CONTEXT), _value_or_none(right, point, CONTEXT)
        if first is None or second is None:
            return None if first is second else False
        return _close(first, ratio * second, tolerance)

    return same_everywhere(compare, names)


def _ratio(left: Node, right: Node, point: Point) -> Any | None:
    """left / right at a point: a fraction or a real number; None where it is neither, or 0."""
    exact = _exact_pair(left, right, point)
    if exact is not None:
        return exact[0] / exact[1] if exact[0] and exact[1] else None
    first, second = numeric_value(left, point), numeric_value(right, point)
    if abs(first) < VANISHING or abs(second) < VANISHING:
        return None
    ratio = first / second
    return CONTEXT.re(ratio) if abs(CONTEXT.im(ratio)) < SAME * abs(ratio) else None
