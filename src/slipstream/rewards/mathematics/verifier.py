"""The reward for a right final answer of a mathematical question.

The pipeline: `answers.py` finds the answer in the response, `notation.py` writes it one way, `structures.py` and
`parser.py` read it, `equivalence.py` compares it with the label. Nothing is evaluated but trees that this package
builds, under bounds that are checked before a value is computed; so a response can neither run code nor take long.
docs/math_grading.md has the decisions.
"""

import math as floats
import re
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from slipstream.rewards.function import Score, ScoredText
from slipstream.rewards.mathematics.answers import find_answer, find_boxes, joined_boxes, marked_answer
from slipstream.rewards.mathematics.characters import plain_characters
from slipstream.rewards.mathematics.equality import undefined_constant
from slipstream.rewards.mathematics.equivalence import same_answer
from slipstream.rewards.mathematics.expressions import Quantity, Text
from slipstream.rewards.mathematics.structures import LONGEST_ANSWER, value_or_none

MOST_GOLD_WORDS = 3
MOST_TEXT_WORDS = 8
"""Words of a label that is a text, bare and in a text command, articles not counted. More of them are a sentence, from
which no answer can be read."""

_ELSEWHERE = frozenset({"see", "proof", "prove", "shown", "explanation", "unknown", "nan", "null", "tbd"})
_ANNOUNCED = re.compile(r"[\W_]{0,8}(?:final\s)?answer\W", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s?\{[A-Za-z*]{1,20}\}")
_NOTHING = frozenset({"None", "none", "N/A", "n/a", "nan", "NaN", "null"})
"""What programs write for a missing value. 'None' as an answer has to be a text command: \\text{None}."""


def math(text: ScoredText, *, last_number: bool = True) -> Score:
    """Return reward 1.0 if the final answer of the response is equivalent to the label, else 0.0.

    The label is a number, or a text: an answer, or a solution that marks its answer, with '#### 72', a box or words.
    `last_number`: a response that marks no answer is judged by its last number; without it, it has no answer.
    Raises ValueError for a label from which no answer can be read: such a question must not pay anybody.
    """
    gold = gold_answer(text.label)
    answer = find_answer(text.response, prompt=text.prompt, last_number=last_number)
    return Score(float(answer is not None and same_answer(gold, answer)), answer=answer)


def gold_answer(label: Any) -> str:
    """Return the answer that a label holds, as text. Raises ValueError if it holds none."""
    if isinstance(label, Integral) and not isinstance(label, bool):
        return str(int(label))
    if isinstance(label, Real) and not isinstance(label, bool) and floats.isfinite(label):
        return str(label)
    if isinstance(label, str):
        answer = _answer_in_label(label)
        if answer is not None:
            return answer
    shown = repr(label)
    raise ValueError(
        "the label must be a number or a text with an answer, such as '72', '\\\\frac{1}{2}', '(C)' or a solution that "
        f"ends in '#### 72', found {shown if len(shown) <= 60 else shown[:60] + '...'}"
    )


@lru_cache(maxsize=1024)
def _answer_in_label(label: str) -> str | None:
    text = plain_characters(label)
    hashes = text.rpartition("####")
    boxes, cut = find_boxes(text)
    if cut:
        return None
    if hashes[1]:
        answer = hashes[2].strip()
    elif boxes:
        answer = joined_boxes(text, boxes)
    else:
        answer = text.strip()
        if value_or_none(answer) is None or _ANNOUNCED.match(answer):
            answer = marked_answer(text) or answer
    return answer if 0 < len(answer) <= LONGEST_ANSWER and answer not in _NOTHING and _is_gold(answer) else None


def _is_gold(answer: str) -> bool:
    """Whether a label's answer has a value, is a few words, or at least is written in mathematical signs."""
    value = value_or_none(answer)
    if value is None:
        words = re.findall(r"(?<!\\)\b[A-Za-z]{3,}", _ENVIRONMENT.sub(" ", answer))
        return len(words) < MOST_GOLD_WORDS and bool(re.search(r"\d|\\[A-Za-z]", answer))
    if isinstance(value, Text):
        words = value.words.split()
        most = MOST_TEXT_WORDS if answer.startswith("\\") else MOST_GOLD_WORDS
        return len(words) <= most and not _ELSEWHERE & set(words)
    return not (isinstance(value, Quantity) and undefined_constant(value.expression))
