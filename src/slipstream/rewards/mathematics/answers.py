"""Which part of a response is its answer.

Runs on the whole response, so every pattern here is linear. What is found is returned as it was written; what it means
is decided in `structures.py`.
"""

import re
from typing import NamedTuple

from slipstream.rewards.mathematics import fallback
from slipstream.rewards.mathematics.characters import plain_characters
from slipstream.rewards.mathematics.fallback import NUMERAL, SENTENCE_END, SPAN, TRIM, is_answer
from slipstream.rewards.mathematics.structures import value_or_none
from slipstream.rewards.mathematics.units import NO_UNITS
from slipstream.rewards.thinking import after_thinking

LONGEST_TAIL = 100_000
"""Characters at the end of a response that are looked at. Answers stand at the end."""

LONGEST_SENTENCE = 400
"""Characters after a marker in which its answer must stand."""

LONGEST_FALLBACK = 10_000
"""Characters at the end of a response in which a number is looked for that nothing marks as the answer."""

_END_TOKENS = re.compile(
    r"<\|(?:im_end|endoftext|end_of_text|eot_id|eom_id|im_start|end|return|user|assistant)\|>|</s>|<eos>|<end_of_turn>"
    r"|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\\\|\\[{}]|[{}]")
_WITHOUT_SPACE = re.compile(r"[^\s$]*")
_BOX_GAP = re.compile(
    r"(?:[\s$,;*]|\\(?:q?quad|[,;!:()\[\] ])|\\text\s?\{\s?,?\s?(?:and|or)?,?\s?\}|\b(?:and|or)\b|\b[A-Za-z]\s?=)*"
)
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT_COMMAND = re.compile(r"^\s?\\(?:text|mathrm|mbox)\s?\{")
_OR_ELSE = re.compile(r"[\s,$;]{0,8}(?:\\text\s?\{\s?)?(?:or|and)\b")
_BOX_SIGN = re.compile(r"[=$(][ ]?-[ ]?$")
_BOX_PART = re.compile(r"(?:\\(?:sqrt|frac|tfrac|dfrac|ln|log|sin|cos|tan)[ ]?\{?|[\^_][ ]?\{?)[ ]?$")
_BOX_FACTOR = re.compile(
    r"[ ]?(?:\\(?:times|cdot|div|pi|sqrt|frac|tfrac|dfrac|pm)(?![A-Za-z])|\^[ ]?\{?[ ]?[-\d(a-zA-Z])"
    r"|[ ]?[+/*-][ ]?(?:\d|\\(?:frac|sqrt|pi|boxed)|[b-zB-HJ-Z](?![A-Za-z]))|[a-fi-ln-rt-zA-KM-Z](?![A-Za-z])"
)
"""What after a box makes a part of it: an operator and a value, or a variable that is no unit."""

_BOX_OPERAND = re.compile(
    r"(?:(?<![A-Za-z])[A-Za-z]|[\d)}\]])[ ]?(?:[+/*]|\\(?:times|cdot|div|pm))[ ]?\Z|\d\Z|\\pm[ ]?\Z"
)
_BOX_DENIED = re.compile(r"(?:\\(?:neq?|not[ ]?=)|!=|\\not\\approx)[\s$]{0,3}$")
_MARKER = re.compile(
    r"\b(?:answers?|correct\s(?:option|choice))\b[*_ \t]{0,6}"
    r"(?:(?:is|are|was|would\sbe|will\sbe|should\sbe|must\sbe)\b|:|=|\n|(?=[$\\\d(-]))[*_:\s]{0,9}|\bchoice\sis\b[*_:\s]{0,9}",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"\b(?:(?:don't|doesn't|didn't|not|cannot|can't|never)\s(?:think|believe|say|claim|know)|doubt|if|whether|suppose|assume|assuming)"
    r"\s(?:that\s)?(?:(?:the|my|our|your)\s)?(?:(?:final|correct|right)\s)?$",
    re.IGNORECASE,
)
"""What before 'the answer is 5' says that it may not be: a denial or a condition."""

_NOT_BUT = re.compile(r"(?:definitely |certainly )?not\s.{1,60}?,?\s(?:but|rather)\s(?:rather\s)?(?=\S)", re.IGNORECASE)
_ASIDE = re.compile(r",\s(?:which|since|because|where|as)\s")
_ANSWER_LINE = re.compile(r"^[*_#> \t]{0,8}(?:final\s)?answer[*_ ]{0,4}:", re.IGNORECASE | re.MULTILINE)
_PREDICATE = re.compile(r"\b(?:is|are|equals)\b")
_OPTION_FIRST = re.compile(r"\([A-Z]\)|[A-Z](?=[.:)])")
_OPTION_EXPLAINED = re.compile(r"\(?([A-Z])\)?[.,:]?\s+(?:[Bb]ecause|[Ss]ince|as|not)\b")


class Box(NamedTuple):
    """The content of a box and where the box begins and ends."""

    content: str
    start: int
    end: int


def find_answer(response: str, *, prompt: str = "", last_number: bool = True) -> str | None:
    """Return the answer of a response as it was written, or None if it has none.

    It is looked for after the thinking: the last box, '####' or 'Answer:' line, whichever is later; else what follows
    the last 'answer is' or the like; else the whole response if it is nothing but an answer; else, with `last_number`,
    the last number. `prompt` tells whether the response began inside of thinking. Thinking that does not end, and a box
    that does not, mean that there is no answer.
    """
    text = final_part(response, prompt)
    if text is None:
        return None
    text = _tagged(text)
    boxes, cut = find_boxes(text)
    if cut:
        return None
    after_boxes = boxes[-1].end if boxes else 0
    hashed = _after_hashes(text, after_boxes)
    if hashed is not None:
        return hashed or None
    if boxes:
        boxes = [box for box in boxes if box.content] or boxes  # "within \\boxed{}" is said of the task
        boxes = [box for box in boxes if not _is_denied(text, box)]
        line = _ANSWER_LINE.search(text, after_boxes)
        concluded = marked_answer(text[line.start() :]) if line else None
        if concluded:
            return concluded
        if not boxes or _in_one_formula(text, boxes):
            return None
        content = _signed(text, boxes[-1], joined_boxes(text, boxes))
        return (
            (marked_answer(_TEXT_COMMAND.sub("", content).rstrip("}")) if "answer" in content else None)
            or content
            or None
        )
    marked = marked_answer(text)
    if marked:
        return marked
    whole = text.strip(TRIM)
    explained = _OPTION_EXPLAINED.match(whole)
    if explained:
        return explained.group(1)
    is_line = len(whole) <= LONGEST_SENTENCE and "\n" not in whole
    if is_line and (_OPTION_FIRST.match(whole) or is_answer(whole, most_words=2)):
        return whole
    return fallback.last_number(text[-LONGEST_FALLBACK:]) if last_number else None


def final_part(response: str, prompt: str = "") -> str | None:
    """Return what a response says after its thinking and before an end token; None if its thinking has no end."""
    text = after_thinking(response, prompt)
    if text is None:
        return None
    text = next((part for part in _END_TOKENS.split(text[-LONGEST_TAIL:]) if part.strip()), "")
    return plain_characters(text)


def find_boxes(text: str) -> tuple[list[Box], bool]:
    """Return the boxes that are in no other box, in order, and whether the last one has no end."""
    closing = _brace_pairs(text)
    boxes: list[Box] = []
    cut = False
    for match in _BOX.finditer(text):
        start = match.start()
        if boxes and start < boxes[-1].end:
            continue
        opening = match.end() + (len(text) > match.end() and text[match.end()].isspace())
        if text[opening : opening + 1] == "{":
            end = closing.get(opening)
            cut = end is None
            if end is not None:
                boxes.append(Box(text[opening + 1 : end].strip(), start, end + 1))
        else:
            word = _WITHOUT_SPACE.match(text, opening)
            assert word is not None
            boxes.append(Box(word.group().rstrip(".,"), start, word.end()))
            cut = False
    return boxes, cut


def joined_boxes(text: str, boxes: list[Box]) -> str:
    """Return the last box and those directly before it: 'x = \\boxed{1} or \\boxed{2}' is one answer of two values."""
    first = len(boxes) - 1
    while first > 0 and _is_gap(text[boxes[first - 1].end : boxes[first].start]):
        first -= 1
    return ", ".join(box.content for box in boxes[first:])


def _signed(text: str, box: Box, content: str) -> str:
    """The content of a box with the sign before it, = -\\boxed{5}; '' where it is only part of a formula."""
    before, after = text[max(0, box.start - 20) : box.start], text[box.end : box.end + 40].partition("\n")[0]
    if _BOX_PART.search(before) or _BOX_OPERAND.search(before) or _BOX_FACTOR.match(after):
        return ""
    if fallback.is_multiplied(_TEXT_COMMAND.sub("", after)):
        return ""
    if re.match(r"\s?\$?\s?\\?%", text[box.end : box.end + 6]):
        content += "\\%"
    return f"-({content})" if _BOX_SIGN.search(before) else content


def _is_denied(text: str, box: Box) -> bool:
    """Whether a response says of a box that it is not the answer: x \\ne \\boxed{3}, 'rather than \\boxed{3}'."""
    before = text[max(0, box.start - 40) : box.start]
    return bool(_BOX_DENIED.search(before)) or fallback.is_denied(before)


def _in_one_formula(text: str, boxes: list[Box]) -> bool:
    """Whether the last two boxes have signs between them but no words, or 'or perhaps': neither is the answer."""
    if len(boxes) < 2 or boxes[-1].content == boxes[-2].content:
        return False
    gap = text[boxes[-2].end : boxes[-1].start]
    return len(gap) <= 40 and not _is_gap(gap) and (not _WORDS.search(gap) or _OR_ELSE.match(gap) is not None)


def _is_gap(text: str) -> bool:
    return len(text) <= 60 and _BOX_GAP.fullmatch(text) is not None


def _brace_pairs(text: str) -> dict[int, int]:
    opened: list[int] = []
    closing: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def _tagged(text: str) -> str:
    """What stands between the last <answer> and its end, or the whole text."""
    _, opened, inside = text.rpartition("<answer>")
    return inside.partition("</answer>")[0] if opened else text


def _after_hashes(text: str, start: int) -> str | None:
    """The answer of the last '####' line after `start` that is no heading, '' if it has none, None without a line.

    A line that other lines follow is a heading unless it is an answer and nothing else.
    """
    end = len(text)
    for _ in range(20):
        position = text.rfind("####", start, end)
        if position < 0:
            return None
        line, _, rest = text[position:].lstrip("# \t").partition("\n")
        line = line.strip(TRIM)
        short = line if len(line) <= LONGEST_SENTENCE else ""
        if not rest.strip():
            return _in_sentence(short) or ""
        if re.search(r"\d|\\", short) and is_answer(short, most_words=0):
            return short
        end = position
    return None


def marked_answer(text: str) -> str | None:
    """Return the answer after the last marker, such as 'the answer is', that has one; None without."""
    for match in reversed(list(_MARKER.finditer(text))[-8:]):
        sentence = text[match.end() : match.end() + LONGEST_SENTENCE].lstrip(TRIM + ":")
        if _SUPPOSED.search(text[max(0, match.start() - 60) : match.start()]):
            continue
        sentence = _NOT_BUT.sub("", _first_sentence(sentence), count=1)
        if re.match(r"(?:definitely |certainly )?not\b", sentence, re.IGNORECASE):
            continue
        found = _in_sentence(sentence)
        if found is not None:
            return found
    return None


def _first_sentence(text: str) -> str:
    if text.startswith("\\["):
        return text.partition("\\]")[0] + "\\]"
    if text.startswith("$$"):
        return "$$" + text[2:].partition("$$")[0] + "$$"
    end = SENTENCE_END.search(text)
    return (text[: end.start()] if end else text).strip(TRIM)


def _in_sentence(sentence: str) -> str | None:
    """The answer in one sentence: all of it, an option's letter, a formula in it, what follows 'is', or a number."""
    sentence = sentence.strip(TRIM).rstrip(".,;:")
    if not sentence:
        return None
    explained = _OPTION_EXPLAINED.match(sentence)
    if explained:
        return explained.group(1)
    if _OPTION_FIRST.match(sentence) or is_answer(sentence, most_words=3):
        return sentence
    answered = _ASIDE.split(sentence)[0].rstrip(".,;: ")
    if answered != sentence and is_answer(answered, most_words=0):
        return answered
    predicate = _PREDICATE.split(sentence)[-1].strip(TRIM)
    if predicate != sentence and is_answer(predicate, most_words=1):
        return predicate
    spans = [next(filter(None, match.groups())) for match in SPAN.finditer(predicate)]
    if spans and not NUMERAL.search(SPAN.sub(" ", predicate)):
        return str(spans[-1]).strip()
    return _number_of(sentence)


def _number_of(sentence: str) -> str | None:
    """The number that a sentence gives for the answer; the sentence, if it makes something else of its number."""
    bare = sentence.lstrip("$(=: ")
    numeral = NUMERAL.match(bare)
    if numeral is None:
        return fallback.last_number(sentence) or (sentence if re.search(r"\d", sentence) else None)
    rest = bare[numeral.end() :]
    other = _OR_OTHER.match(rest)
    if other:
        return f"{numeral.group()}, {other.group(1)}"
    if re.match(r"\+(?!\s?\S)|\s+[-+]?\d", rest):
        return sentence  # 12+, 12 13
    following = re.match(r"\W*(\w+)", rest)
    word = following.group(1).lower() if following else ""
    is_other = bool({word, word.removesuffix("s")} & NO_UNITS - _PROSE) or fallback.is_multiplied(rest)
    if re.match(r"\s?(?:percent|pct)\b(?!\sof)", rest):
        return numeral.group() + "%"
    if is_other or (re.search(r"\d", rest) and value_or_none(sentence) is not None):
        return sentence
    words = re.split(r"[\d,(]", rest, maxsplit=1)[0]
    return numeral.group() if fallback.last_number(numeral.group() + words) else sentence


_OR_OTHER = re.compile(r"\s?\(or\s(?:(?:maybe|perhaps|possibly|else|rather)\s)?([^()]{0,30}\d[^()]{0,30})\)")
"""What takes back half of a number, or says it again: 5 (or maybe 6), 1/2 (or 0.5)."""

_PROSE = frozenset({"for", "by", "with", "but", "when", "where", "not", "never", "no", "instead", "rather"})
"""Words of `NO_UNITS` that go on with the sentence after a number, and leave it what it is."""
