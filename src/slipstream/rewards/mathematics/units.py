"""Units of measure, as far as they tell two answers apart.

A unit on one side only is not looked at, nor is one that is not in the table; 5 cm and 5 m are different answers.
"""

import re

_ALIASES: dict[str, str] = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre 毫米",
        "cm centimeter centimetre 厘米",
        "m meter metre 米",
        "km kilometer kilometre kph 千米 公里",
        "inch in inches",
        "foot ft feet",
        "yard yd",
        "mile mi mph",
        "mg milligram",
        "g gram 克",
        "kg kilogram 千克 公斤",
        "lb pound lbs",
        "oz ounce",
        "second sec s 秒",
        "minute min 分钟",
        "hour hr h 小时",
        "day 天",
        "week",
        "month",
        "year 年",
        "ml milliliter millilitre 毫升",
        "l liter litre 升",
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


NO_UNITS = (
    {"not", "never", "neither", "nor", "except", "wrong", "incorrect", "false", "no", "but", "than", "if", "when"}
    | {"million", "billion", "trillion", "thousand", "hundred", "dozen", "score", "half", "halves", "third", "fourth"}
    | {
        "quarter",
        "fifth",
        "sixth",
        "eighth",
        "tenth",
        "hundredth",
        "squared",
        "cubed",
        "factorial",
        "power",
        "pi",
        "infinity",
    }
    | {
        "over",
        "plus",
        "minus",
        "times",
        "divided",
        "multiplied",
        "choose",
        "mod",
        "modulo",
        "out",
        "to",
        "versus",
        "vs",
    }
    | {"maybe", "possibly", "perhaps", "instead", "rather", "between", "unless", "otherwise", "negative", "where"}
    | {"base", "by", "with", "for", "cannot", "can't", "isn't", "even", "twice", "least", "most", "fewer", "less"}
)
"""Words after a number that make another answer of it, or none: factors, operators, conditions, denials."""


def conflicting(first: str | None, second: str | None) -> bool:
    """Return whether two units, as they are written, are known and differ, or both have powers and these differ."""
    if not first or not second:
        return False
    known, powers = [[read(unit) for unit in (first, second)] for read in (_known, _powers)]
    return all(known) and (not known[0] & known[1] or (all(powers) and powers[0] != powers[1]))


def is_currency(word: str) -> bool:
    """Return whether a word may stand before a number as its unit."""
    return word in _CURRENCIES


_LETTERS = frozenset("mgshlLNJWVC")
"""Letters that are units after a number where they are written as text; K may be kelvin or thousand."""

_COUNTED = "元 个 人 只 本 棵 辆 块 次 种 页 条 名 岁 度 吨 平方米 平方厘米 立方米 立方厘米"
"""What is counted in Chinese without a name in the table; 万 and the like multiply, and are no units."""

_FOREIGN = sorted([*_COUNTED.split(), *(alias for alias in _ALIASES if not alias.isascii())], key=len, reverse=True)
_FOREIGN_UNIT = re.compile(rf"(?<=[\d}})])\s?({'|'.join(_FOREIGN)})$")


def is_unit(text: str) -> bool:
    """Return whether a text that follows a number is a unit: a letter, or known names with powers, m/s^2."""
    if text in _LETTERS:
        return True
    words = re.findall(r"[A-Za-z]+", text)
    shape = re.fullmatch(r"[A-Za-z]+(?:\^-?\d)?(?:\s?[/*\s]\s?[A-Za-z]+(?:\^-?\d)?){0,4}", text)
    return shape is not None and all(word in _LETTERS or word.lower() in _ALIASES for word in words)


def foreign_units(text: str) -> str:
    """Return an answer whose last word is a Chinese unit after a number with it in a text command."""
    return text if text.isascii() else _FOREIGN_UNIT.sub(_translated, text)


def _translated(match: re.Match[str]) -> str:
    return rf"\text{{ {_ALIASES.get(match.group(1), 'unit')}}}"


_CURRENCIES = frozenset({"dollars", "euros", "pounds sterling", "usd", "rs", "eur"})
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}


def _powers(unit: str) -> set[str]:
    parts = re.findall(r"[a-z]+|\d", unit.lower())
    return {_POWERS.get(part, part) for part in parts if part in _POWERS or part.isdigit()}


def _known(unit: str) -> set[str]:
    words = re.findall(r"[a-z]+", unit.lower().replace("a.m", "am").replace("p.m", "pm"))
    return {_ALIASES[name] for word in words for name in (word, word.removesuffix("s")) if name in _ALIASES}
