"""Units of measure, as far as they tell two answers apart.

A unit on one side only is not looked at, nor is one that is not in the table; 5 cm and 5 m are different answers.
"""

import re

_ALIASES: dict[str, str] = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre kph",
        "inch in inches",
        "foot ft feet",
        "yard yd",
        "mile mi mph",
        "mg milligram",
        "g gram",
        "kg kilogram",
        "lb pound lbs",
        "oz ounce",
        "second sec s",
        "minute min",
        "hour hr h",
        "day",
        "week",
        "month",
        "year",
        "ml milliliter millilitre",
        "l liter litre",
        "gallon gal",
        "dollar usd",
        "cent",
        "euro eur",
        "sterling",
        "celsius c",
        "fahrenheit f",
        "am",
        "pm",
        "degree deg",
        "radian rad",
    )
    for alias in names.split()
}


def conflicting(first: str | None, second: str | None) -> bool:
    """Return whether two units, as they are written, are known and differ, or both have powers and these differ."""
    if not first or not second:
        return False
    known, powers = [[read(unit) for unit in (first, second)] for read in (_known, _powers)]
    return all(known) and (not known[0] & known[1] or (all(powers) and powers[0] != powers[1]))


def is_currency(word: str) -> bool:
    """Return whether a word may stand before a number as its unit."""
    return word in _CURRENCIES


_CURRENCIES = frozenset({"dollars", "euros", "pounds sterling", "usd", "rs", "eur"})
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}


def _powers(unit: str) -> set[str]:
    parts = re.findall(r"[a-z]+|\d", unit.lower())
    return {_POWERS.get(part, part) for part in parts if part in _POWERS or part.isdigit()}


def _known(unit: str) -> set[str]:
    words = re.findall(r"[a-z]+", unit.lower().replace("a.m", "am").replace("p.m", "pm"))
    return {_ALIASES[name] for word in words for name in (word, word.removesuffix("s")) if name in _ALIASES}
