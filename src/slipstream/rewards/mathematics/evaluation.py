"""The value of an expression: exactly where it is rational, else with 60 digits; bounded before it is computed.

Expressions with variables are evaluated at chosen points. No symbolic algebra: two expressions are equal if they are
equal wherever they are looked at, and a false match at several random points in 60 digits does not happen.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import Any

import mpmath

from slipstream.rewards.mathematics.expressions import (
    APPLIED,
    Call,
    Constant,
    Node,
    Number,
    Power,
    Product,
    Sum,
    Symbol,
)

MOST_BITS = 60_000
"""Size of an exact result, numerator and denominator together: 5000! has 54 thousand bits."""

LARGEST_FACTORIAL = 5000
LARGEST_ARGUMENT = 10**6
"""Bound on arguments of functions that have to be reduced or whose value grows with them."""

WORK = 1_500_000
"""Bits that all exact steps of one evaluation may produce together; greatest common divisors make them quadratic."""

CONTEXT: Any = mpmath.mp.clone()
CONTEXT.dps = 60
PRECISE: Any = mpmath.mp.clone()
PRECISE.dps = 180
"""For differences that vanish in 60 digits."""


class TooLargeError(Exception):
    """A value whose computation would exceed a bound."""


class UndefinedError(Exception):
    """A value that does not exist, such as 1/0."""


def exact_value(node: Node, point: Mapping[str, Fraction]) -> Fraction | None:
    """Return the value as a fraction, or None if it is not rational or not found to be.

    `point` has a value for each variable. Raises TooLargeError and UndefinedError.
    """
    return _Exact(point).value(node)


class _Exact:
    def __init__(self, point: Mapping[str, Fraction]) -> None:
        self._point = point
        self._work = WORK

    def value(self, node: Node) -> Fraction | None:
        match node:
            case Number(value=value):
                return value
            case Symbol(name=name):
                return self._point.get(name)
            case Constant():
                return None
            case Sum(terms=nodes) | Product(factors=nodes):
                return self._combined(node, nodes)
            case Power(base=base, exponent=exponent):
                return self._power(self.value(base), self.value(exponent))
            case Call(name=name, arguments=arguments):
                return self._call(name, [self.value(argument) for argument in arguments])

    def _combined(self, node: Sum | Product, nodes: tuple[Node, ...]) -> Fraction | None:
        values = [self.value(each) for each in nodes]
        if any(value is None for value in values):
            return None
        result = Fraction(int(isinstance(node, Product)))
        for value in values:
            assert value is not None
            result = self._checked(result * value if isinstance(node, Product) else result + value)
        return result

    def _power(self, base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
        if base is None or exponent is None:
            return None
        if exponent.denominator != 1:
            root = self._root(base, Fraction(exponent.denominator))
            return None if root is None else self._power(root, Fraction(exponent.numerator))
        if not base and exponent < 0:
            raise UndefinedError("division by 0")
        if abs(base) != 1 and base and abs(exponent) * _bits(base) > 2 * MOST_BITS:
            raise TooLargeError("a power with too many digits")
        if abs(base) == 1:
            exponent = Fraction(int(exponent) % 2)
        return self._checked(base ** int(exponent))

    def _root(self, radicand: Fraction, index: Fraction) -> Fraction | None:
        """The real root where it is rational. None for the others and for even roots of negative numbers."""
        if index.denominator != 1 or not 2 <= index <= 64 or (radicand < 0 and index % 2 == 0):
            return None
        order = int(index)
        parts = [_integer_root(abs(part), order) for part in (radicand.numerator, radicand.denominator)]
        if parts[0] is None or parts[1] is None:
            return None
        return Fraction(parts[0] if radicand >= 0 else -parts[0], parts[1])

    def _call(self, name: str, values: list[Fraction | None]) -> Fraction | None:
        first = values[0]
        if first is None or any(value is None for value in values):
            return None
        second = values[1] if len(values) > 1 else None
        if name.rstrip("'") in APPLIED:
            return _unknown(name, str(first))
        if name in ("root", "sqrt"):
            return self._root(first, Fraction(2) if second is None else second)
        if name == "abs":
            return abs(first)
        if name in ("floor", "ceil"):
            return Fraction(math.floor(first) if name == "floor" else math.ceil(first))
        if name == "degree":
            return first
        if name == "factorial" and first.denominator == 1:
            return self._checked(Fraction(_factorial(first)))
        if name == "double_factorial":
            return self._checked(Fraction(_double_factorial(first)))
        if name == "binomial" and second is not None and first.denominator == second.denominator == 1:
            if not 0 <= second <= first:
                raise UndefinedError("a binomial coefficient out of range")
            if first > LARGEST_FACTORIAL:
                raise TooLargeError("a large binomial coefficient")
            return self._checked(Fraction(_combinations(int(first), int(second))))
        return None

    def _checked(self, value: Fraction) -> Fraction:
        bits = _bits(value)
        self._work -= bits
        if bits > MOST_BITS or self._work < 0:
            raise TooLargeError("a fraction with too many digits")
        return value


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


@lru_cache(maxsize=64)
def _combinations(total: int, chosen: int) -> int:
    """The binomial coefficient. A large one may stand in a product a hundred times, at each of several points."""
    return math.comb(total, chosen)


@lru_cache(maxsize=64)
def _factorial(value: Fraction) -> int:
    if value < 0:
        raise UndefinedError("the factorial of a negative integer")
    if value > LARGEST_FACTORIAL:
        raise TooLargeError("a large factorial")
    return math.factorial(int(value))


def _double_factorial(value: Fraction) -> int:
    """n (n - 2) (n - 4) ... down to 1 or 2."""
    if value < 0 or value.denominator != 1:
        raise UndefinedError("the double factorial of what is no natural number")
    if value > LARGEST_FACTORIAL:
        raise TooLargeError("a large double factorial")
    return math.prod(range(int(value), 0, -2))


def _integer_root(value: int, order: int) -> int | None:
    if value < 2:
        return value
    if order == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value.bit_length() > 1000:
        return None
    guess = round(value ** (1 / order))
    return next((root for root in (guess - 1, guess, guess + 1) if root**order == value), None)


def numeric_value(node: Node, point: Mapping[str, Fraction], context: Any = CONTEXT) -> Any:
    """Return the value as a real or complex number of the mpmath context.

    Odd roots of negative numbers are the real ones. Raises TooLargeError and UndefinedError.
    """
    try:
        value = _Numeric(point, context).value(node)
    except (ZeroDivisionError, ValueError) as error:
        raise UndefinedError(str(error)) from error
    except OverflowError as error:
        raise TooLargeError(str(error)) from error
    if not context.isfinite(value):
        raise UndefinedError("a value that is not finite")
    return value


def _unknown(name: str, argument: str) -> Fraction:
    """The value of a function of which nothing is known: any, but the same for the same argument."""
    return Fraction(Random(f"{name} {argument}").randint(400, 3999), 1009)


class _Numeric:
    def __init__(self, point: Mapping[str, Fraction], context: Any) -> None:
        self._point = point
        self._context = context

    def value(self, node: Node, *, angle: bool = False) -> Any:
        """`angle`: degrees inside are turned into radians, as the argument of a trigonometric function needs."""
        match node:
            case Number(value=value):
                return self._rational(value)
            case Symbol(name=name):
                return self._rational(self._point[name])
            case Constant(name=name):
                return self._constant(name)
            case Sum(terms=terms):
                return self._context.fsum([self.value(term, angle=angle) for term in terms])
            case Product(factors=factors):
                return self._context.fprod([self.value(factor, angle=angle) for factor in factors])
            case Power(base=base, exponent=exponent):
                return self._power(base, exponent)
            case Call(name="degree", arguments=arguments):
                value = self.value(arguments[0])
                return value * self._context.pi / 180 if angle else value
            case Call():
                return self._call(node)

    def _rational(self, value: Fraction) -> Any:
        return self._context.mpf(value.numerator) / value.denominator

    def _constant(self, name: str) -> Any:
        if name == "infinity":
            raise UndefinedError("infinity in an expression")
        return {"pi": self._context.pi, "e": self._context.e, "i": self._context.mpc(0, 1)}[name] + 0

    def _power(self, base_node: Node, exponent_node: Node) -> Any:
        context = self._context
        base = self.value(base_node)
        exponent = exact_value(exponent_node, self._point)
        power = self.value(exponent_node) if exponent is None else self._rational(exponent)
        if base == 0:
            if exponent is None or exponent < 0:
                raise UndefinedError("division by 0")
            return base if exponent else context.mpf(1)
        if abs(context.mag(base)) * abs(power) > MOST_BITS:
            raise TooLargeError("a power with too many digits")
        if exponent is None:
            return context.power(base, power)
        if exponent.denominator == 1:
            return base ** int(exponent)
        if exponent.denominator % 2 and context.im(base) == 0 and context.re(base) < 0:
            magnitude = context.power(-context.re(base), power)
            return -magnitude if exponent.numerator % 2 else magnitude
        return context.power(base, power)

    def _call(self, node: Call) -> Any:
        name, arguments = node.name, node.arguments
        if name in ("root", "sqrt"):
            index = arguments[1] if len(arguments) > 1 else Number(Fraction(2))
            return self._power(arguments[0], Power(index, Number(Fraction(-1))))
        if name.rstrip("'") in APPLIED:
            exact = exact_value(arguments[0], self._point)
            value = self.value(arguments[0]) if exact is None else None
            return self._rational(_unknown(name, str(exact) if value is None else self._context.nstr(value, 30)))
        if name == "double_factorial":
            raise TooLargeError("a double factorial of what is not rational")
        values = [self.value(argument, angle=name in _ANGLE_FUNCTIONS) for argument in arguments]
        if abs(values[0]) > LARGEST_ARGUMENT and name not in ("abs", "log", "ln"):
            raise TooLargeError(f"{name} of a large number")
        if name == "log":
            base = values[1] if len(values) > 1 else self._context.mpf(10)
            return self._context.log(values[0]) / self._context.log(base)
        if name == "factorial" and values[0] == int(self._context.re(values[0])):
            return self._context.mpf(_factorial(Fraction(int(self._context.re(values[0])))))
        if name in ("floor", "ceil", "binomial") and any(self._context.im(value) != 0 for value in values):
            raise UndefinedError(f"{name} of a complex number")
        return getattr(self._context, _METHODS[name])(*values)


_ANGLE_FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "cis"})
_METHODS = {
    name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp")
} | {
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arccot": "acot",
    "arcsec": "asec",
    "arccsc": "acsc",
    "ln": "ln",
    "abs": "fabs",
    "floor": "floor",
    "ceil": "ceil",
    "factorial": "factorial",
    "binomial": "binomial",
    "cis": "expj",
}
