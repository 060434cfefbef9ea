"""Numbers in words: six, twenty-five, two thirds, one hundred five, 5 million."""

from fractions import Fraction

_TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
NUMBER_WORDS = {
    **{"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6},
    **{"seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14},
    **{"fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19},
    **_TENS,
}

MULTIPLIERS = {
    **{"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    "dozen": 12,
}
"""Words after a number that multiply it."""

_PARTS = {
    **{"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8},
    **{"ninth": 9, "tenth": 10, "hundredth": 100},
}
_SIGNS = ("minus", "minu", "negative")
"""Words that turn the sign; `structures.normal_words` takes the s of minus for a plural."""

MOST_WORDS = 12


def number_in_words(text: str) -> Fraction | None:
    """Return the number that lower-case words make up, None if they are no number.

    Hyphens join words. A part needs its count: 'two thirds', but 'third' is a place.
    """
    words = text.replace("-", " ").split()
    if not words or len(words) > MOST_WORDS:
        return None
    if words[0] in _SIGNS:
        value = number_in_words(" ".join(words[1:]))
        return None if value is None else -value
    part = _PARTS.get(words[-1].removesuffix("s"))
    if words == ["half"]:
        return Fraction(1, 2)
    if part is not None:
        count = _whole(words[:-1])
        return None if count is None or not 0 < count < part else Fraction(count, part)
    whole = _whole(words)
    return None if whole is None else Fraction(whole)


def _whole(words: list[str]) -> int | None:
    """An integer: units after tens, hundreds after units, and these times thousands that become smaller."""
    total = group = 0
    last, largest = "", 10**15
    for word in words:
        if word in _TENS or (word in NUMBER_WORDS and NUMBER_WORDS[word] > 9):
            fits = last in ("", "hundred", "multiplier")
            group, last = group + NUMBER_WORDS[word], "tens" if word in _TENS else "unit"
        elif word in NUMBER_WORDS:
            fits = last in ("", "hundred", "multiplier") or (last == "tens" and NUMBER_WORDS[word] > 0)
            group, last = group + NUMBER_WORDS[word], "unit"
        elif word == "hundred":
            fits = last in ("", "unit") and group < 10
            group, last = (group or 1) * 100, "hundred"
        elif word in MULTIPLIERS and word != "dozen":
            fits = last in ("", "unit", "tens", "hundred") and MULTIPLIERS[word] < largest
            total, group, last = total + (group or 1) * MULTIPLIERS[word], 0, "multiplier"
            largest = MULTIPLIERS[word]
        else:
            return None
        if not fits:
            return None
    return total + group if last else None
