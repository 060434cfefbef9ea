"""The built-in reward rules that compare an answer with a label.

They read model output, which may hold anything, so nothing here evaluates it: answers are matched by regular
expressions that run in linear time, and numerals are bounded in length before they become numbers. Symbolic
mathematics is left out; it needs a library, and a process that can be killed.
"""

import math
import re
from fractions import Fraction
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.rewards.function import ScoredText

BUILTIN_REWARDS: dict[str, str] = {
    "number": "slipstream.rewards.rules:number",
    "exact_match": "slipstream.rewards.rules:exact_match",
    "reasoning_gym": "slipstream.rewards.reasoning:reasoning_gym",
}
"""Names that `reward.function` takes as they are, and where their functions are."""

LONGEST_NUMERAL = 60
"""Characters of a numeral; longer ones are no answer. Exact arithmetic on what is left takes microseconds."""

# A numeral does not begin inside a word ("AZYUK2A") or another numeral, and a minus after a digit or a bracket is an
# operator ("10-7"), not a sign.
_NUMERAL = re.compile(
    r"(?:(?<![\w.,)\]}])[-+])?(?<![\w.,])(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?"
)
_ANSWER_MARKER = re.compile(r"answer\s?(?:is|:|=)", re.IGNORECASE)
_TEXT_FRACTION = re.compile(r"\\[dt]?frac\{([-+]?\d+)\}\{(\d+)\}")
_UNIT = re.compile(r"\\(?:text|textnormal|mathrm|mbox)\{[^{}]*\}\s*$")
_AROUND = " \t\n*_:=()[]`"
_BOX = "\\boxed"


def number(text: "ScoredText") -> float:
    """Return 1.0 if the final number of the response equals the label exactly, else 0.0.

    The final number is, in this order: what follows the last '####' (as in GSM8K), the content of the last \\boxed{},
    what follows the last 'answer is' or 'answer:', and else the last number of the text. Text before a closing
    </think> is not looked at. A marker or box without a single number in it means there is no answer.
    Thousands separators, signs, decimals and fractions are understood; a percent sign and a unit are dropped.
    Values are compared as exact fractions: 0.5 equals 1/2, and 0.33 does not equal 1/3.
    The label may be a number or a text, such as a whole GSM8K solution that ends in '#### 72'.
    Raises ValueError if the label is no number: a row without a right answer must not pay anybody.
    """
    expected = _label_value(text.label)
    return 1.0 if final_number(text.response) == expected else 0.0


def exact_match(text: "ScoredText") -> float:
    """Return 1.0 if the response equals the label but for white space around it, else 0.0.

    Raises ValueError if there is no label.
    """
    if text.label is None or not str(text.label).strip():
        raise ValueError(f"the label must be a text to compare with, found {text.label!r}")
    return 1.0 if text.response.strip() == str(text.label).strip() else 0.0


def final_number(response: str) -> Fraction | None:
    """Return the number a response ends up with, by the order described at `number`; None if it has none."""
    response = _normalize(response.rpartition("</think>")[2])
    _, marker, after_marker = response.rpartition("####")
    if marker:
        return _leading_number(after_marker)
    box = _last_box(response)
    if box is not None:
        return _whole_number(box)
    markers = list(_ANSWER_MARKER.finditer(response))
    if markers:
        value = _leading_number(response[markers[-1].end() :])
        if value is not None:
            return value
    numerals = _NUMERAL.findall(response)
    return _parse(numerals[-1]) if numerals else None


def _label_value(label: Any) -> Fraction:
    """The number of a label; ValueError if it is none."""
    if isinstance(label, Integral) and not isinstance(label, bool):
        return Fraction(int(label))
    if isinstance(label, Real) and not isinstance(label, bool) and math.isfinite(label):
        return Fraction(str(label))  # by its decimal text, so that the float 0.1 is 1/10
    if isinstance(label, str):
        text = _normalize(label)
        _, marker, after_marker = text.rpartition("####")
        box = _last_box(text)
        value = _leading_number(after_marker) if marker else _whole_number(text if box is None else box)
        if value is not None:
            return value
    shown = repr(label)
    raise ValueError(f"the label must be a number, found {shown if len(shown) <= 60 else shown[:60] + '...'}")


def _normalize(text: str) -> str:
    """Write minus signs and fractions one way, and drop currency and percent signs and LaTeX spaces."""
    for written in ("\\$", "$", "\\%", "%", "\\!", "\\,"):
        text = text.replace(written, "")
    return _TEXT_FRACTION.sub(r"\1/\2", text.replace("\u2212", "-"))


def _last_box(text: str) -> str | None:
    """Content of the last \\boxed{...}, braces balanced, or of '\\boxed 7'; None if there is no box."""
    _, marker, rest = text.rpartition(_BOX)
    if not marker:
        return None
    rest = rest.lstrip()
    if not rest.startswith("{"):
        return rest.split(maxsplit=1)[0].rstrip(".") if rest else ""
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position]
    return rest[1:]  # the response was cut inside the box


def _leading_number(text: str) -> Fraction | None:
    """The number a text begins with, after white space and emphasis; None if it begins with something else."""
    match = _NUMERAL.match(text.lstrip(_AROUND))
    return _parse(match.group()) if match else None


def _whole_number(text: str) -> Fraction | None:
    """The number a text consists of, apart from brackets, emphasis and a unit; None if there is more to it."""
    match = _NUMERAL.fullmatch(_UNIT.sub("", text).strip(_AROUND).rstrip("."))
    return _parse(match.group()) if match else None


def _parse(numeral: str) -> Fraction | None:
    """Value of what `_NUMERAL` matched; None if it is too long or its denominator is 0."""
    if len(numeral) > LONGEST_NUMERAL:
        return None
    top, _, bottom = "".join(numeral.replace(",", "").split()).partition("/")
    denominator = int(bottom or "1")
    return Fraction(top) / denominator if denominator else None
