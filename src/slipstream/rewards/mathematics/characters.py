"""From the characters of all scripts to ASCII and LaTeX commands.

The first step of reading, on whole responses as well as on answers: linear, and nothing fails.
"""

import re
import unicodedata
from functools import lru_cache

_CHARACTERS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
    **dict.fromkeys("\u201c\u201d\u201e\u2033", '"'),
    **dict.fromkeys("\u2018\u2019\u2032", "'"),
    "\u00d7": r"\times ",
    "\u2715": r"\times ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u2217": "*",
    "\u00f7": "/",
    "\u2044": "/",
    "\u2215": "/",
    "\u2264": r"\le ",
    "\u2a7d": r"\le ",
    "\u2265": r"\ge ",
    "\u2a7e": r"\ge ",
    "\u2260": r"\ne ",
    "\u2248": r"\approx ",
    "\u221e": r"\infty ",
    "\u221a": r"\sqrt ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2205": r"\emptyset ",
    "\u2208": r"\in ",
    "\u00b1": r"\pm ",
    "\u2213": r"\mp ",
    "\u00b0": r"^\circ ",
    "\u27e8": r"\langle ",
    "\u27e9": r"\rangle ",
    **{sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("\u211d\u2124\u2115\u211a\u2102", "RZNQC", strict=True)},
    "\u2026": "...",
    "\u3001": ",",
    "\u3002": ".",
    "\u066b": ".",
    "\u066c": ",",
    "\u00ba": r"^\circ ",
    "\u2103": r"^\circ C",
    "\u2109": r"^\circ F",
    "\u221b": r"\sqrt[3] ",
    "\u221c": r"\sqrt[4] ",
    "\u2219": r"\cdot ",
    "\u2216": r"\setminus ",
    "\u2220": r"\angle ",
    "\u25b3": r"\triangle ",
    "\u2234": r"\therefore ",
    "\u2261": r"\equiv ",
    "\u223c": r"\sim ",
    "\u2223": "|",
    "\u230a": r"\lfloor ",
    "\u230b": r"\rfloor ",
    "\u2308": r"\lceil ",
    "\u2309": r"\rceil ",
    **dict.fromkeys("\u2713\u2714\u2705", " "),
}
_SMALL_GREEK = "αβγδεζηθικλμνξπρστυφχψωϕϵ"
_SMALL_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi"
    " chi psi omega phi epsilon"
)
_CAPITAL_GREEK = "ΓΔΘΛΞΠΣΦΨΩ"
_CAPITAL_NAMES = "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
_CHARACTERS |= {
    letter: rf"\{name} "
    for letter, name in zip(_SMALL_GREEK + _CAPITAL_GREEK, f"{_SMALL_NAMES} {_CAPITAL_NAMES}".split(), strict=True)
}
_SUPERSCRIPTS = dict(
    zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a", "0123456789-+", strict=True)
)
_NOT_ASCII = re.compile(rf"([{''.join(_SUPERSCRIPTS)}]+)|([\u2080-\u2089]+)|[^\x00-\x7f]")

_AREA = re.compile(r"(?<=\d)(\s?)([kcdm]?m|ft|in)([\u00b2\u00b3])(?![\w(])")


def plain_characters(text: str) -> str:
    """Write foreign digits, signs and letters in ASCII, with LaTeX commands for symbols, and drop invisible characters.

    Invisible are format characters: zero-width spaces and joiners, marks of writing direction, byte-order marks.
    """
    if text.isascii():
        return text
    return _NOT_ASCII.sub(_replace_character, _AREA.sub(_area, text))


def _area(match: re.Match[str]) -> str:
    """m² after a digit, as a unit: elsewhere m is a variable."""
    power = "square" if match.group(3) == "\u00b2" else "cubic"
    return f"{match.group(1)}\\text{{{power} {match.group(2)}}}"


def _replace_character(match: re.Match[str]) -> str:
    if match.group(1):
        return "^{" + "".join(_SUPERSCRIPTS[character] for character in match.group(1)) + "}"
    if match.group(2):
        return "_{" + "".join(str(ord(character) - 0x2080) for character in match.group(2)) + "}"
    return _ascii(match.group())


@lru_cache(maxsize=4096)
def _ascii(character: str) -> str:
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    category = unicodedata.category(character)
    if category == "Cf":
        return ""
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Zs":
        return " "
    if unicodedata.decomposition(character).startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKD", character).partition("\u2044")
        return rf"\frac{{{top}}}{{{bottom}}}"
    if unicodedata.decomposition(character).startswith("<font>"):  # letters in the alphabets of mathematics
        return unicodedata.normalize("NFKD", character)
    if "\uff01" <= character <= "\uff5e":  # full-width forms of the ASCII characters
        return chr(ord(character) - 0xFEE0)
    return character
