"""Plain Python data as JSON, between tests and the program under test.

Runs inside the sandbox on both sides. What arrives is built from exact built-in types by reading, so a value cannot
bring operators of its own along. What is not plain data travels as a number that its owner gives it.
"""

import sys
from collections.abc import Callable
from typing import Any

LARGEST_WRITTEN_INTEGER = 1 << 63
"""Larger ones travel in hexadecimal, which takes linear time to read and is not limited in length by Python."""

TIMES = ("datetime", "date", "time")
"""Types of the module `datetime` that have a text; a datetime is a date too, so it comes first."""

SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, number_of: Callable[[Any], int]) -> Any:
    """Return a value as JSON knows it. `number_of` gives the number of an object that is not plain data."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < LARGEST_WRITTEN_INTEGER else {"integer": hex(value)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [encode(element, number_of) for element in value]
    if isinstance(value, tuple | set | frozenset):
        kind = next(name for name, kind in SEQUENCES.items() if isinstance(value, kind))
        return {kind: [encode(element, number_of) for element in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, number_of), encode(element, number_of)] for key, element in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, range):
        return {"range": [encode(bound, number_of) for bound in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if _is(value, "fractions", "Fraction"):
        return {"fraction": [hex(value.numerator), hex(value.denominator)]}
    if _is(value, "decimal", "Decimal"):
        return {"decimal": str(value)}
    if _is(value, "collections", "deque"):
        return {"deque": [encode(element, number_of) for element in value]}
    for kind in TIMES:
        if _is(value, "datetime", kind):
            return {kind: value.isoformat()}
    if _is(value, "datetime", "timedelta"):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    return {"object": number_of(value)}


def decode(value: Any, object_of: Callable[[int], Any]) -> Any:
    """Return the value that was encoded. `object_of` gives the object of a number.

    Raises TypeError, ValueError, ArithmeticError or RecursionError for what `encode` did not write.
    """
    if isinstance(value, list):
        return [decode(element, object_of) for element in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "object":
            return object_of(content)
        case "integer":
            return int(content, 16)
        case "tuple" | "set" | "frozenset":
            return SEQUENCES[kind](decode(element, object_of) for element in content)
        case "dict":
            return {decode(key, object_of): decode(element, object_of) for key, element in content}
        case "bytes":
            return bytes.fromhex(content)
        case "range":
            return range(*(decode(bound, object_of) for bound in content))
        case "deque":
            from collections import deque

            return deque(decode(element, object_of) for element in content)
        case "date" | "time" | "datetime" | "timedelta":
            import datetime

            found = getattr(datetime, kind)
            return found(*content) if kind == "timedelta" else found.fromisoformat(content)
        case "complex":
            return complex(*content)
        case "fraction":
            from fractions import Fraction

            return Fraction(*(int(number, 16) for number in content))
        case "decimal":
            from decimal import Decimal

            return Decimal(content)
    raise ValueError(f"expected plain data, found {kind!r}")


def import_types() -> None:
    """Import now what `decode` needs the modules of."""
    import datetime  # noqa: F401
    from collections import deque  # noqa: F401
    from decimal import Decimal  # noqa: F401
    from fractions import Fraction  # noqa: F401


def _is(value: object, module: str, name: str) -> bool:
    """Whether a value is of a type of a module that takes long to import, and that may not have been."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
