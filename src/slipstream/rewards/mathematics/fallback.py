"""The last number of a text that marks no answer, with the formula that it stands in.

A number is taken only if nothing beside it makes another value of it: an operator, a bound, a denial; and if no
conclusion without a number follows.
"""

import re

from slipstream.rewards.mathematics.expressions import Quantity, Text
from slipstream.rewards.mathematics.notation import FUNCTIONS, OPERATOR_WORDS, UNIT_NAMES
from slipstream.rewards.mathematics.numerals import NUMBER_WORDS
from slipstream.rewards.mathematics.structures import value_or_none

SPAN = re.compile(r"\$\$([^$]{1,400})\$\$|\$([^$\n]{1,400})\$|\\\(([^\n]{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL)
NUMERAL = re.compile(
    r"(?:(?<![\w.,)\]}])[-+])?(?<![\w.,])(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?",
    re.ASCII,
)
SENTENCE_END = re.compile(r"[.?](?=\s|$)|(?<!\\)!(?=\s|$)|\n")
TRIM = " \t\r\n*_`\"'"

_NEGATION = re.compile(
    r"(?:\b(?:not|never|cannot|neither|nor|instead\sof|rather\sthan|opposed\sto)|n't|\bno\s(?:es|son)|\u4e0d\u662f|\u5e76\u975e|\u5927\u4e8e"
    r"|\u5c0f\u4e8e|\u4e0d\u7b49\u4e8e|\u81f3\u5c11|\u81f3\u591a)"
    r"(?:\s(?:be|equal|to|exactly)){0,3}[\s$]*$"
    r"|(?:n't|\bnot|\bnever)\s(?:think|believe|say|claim)\s[^.\d]{0,40}$",
    re.IGNORECASE,
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s?\{[A-Za-z]{1,20}\}")
_PHRASE = re.compile(r"\\text\s?\{[A-Za-z\d ,.]{1,60}\}")
_JOINED_LEFT = re.compile(r"(?:^|\s)([^\s,]{1,40}),?\s+(?:or|and)\s*$|(?:^|\s)([^\s,]{1,40}),\s*$", re.IGNORECASE)
_JOINT = re.compile(r"\s*,?\s*(?:and|or)?\s*", re.IGNORECASE)
_CONCLUSION = re.compile(
    r"\b(?:therefore|hence|thus|so(?!\s(?:that|we\sare\sdone)\b)|consequently|conclude|conclusion|(?:can't|cannot|unable\sto)\s(?:solve|answer|determine))\b",
    re.IGNORECASE,
)
_PLAIN_WORDS = UNIT_NAMES | OPERATOR_WORDS.keys() | {"and", "or", "pi", "infinity", "inf", "frac", "sqrt", "text"}

_OPERATOR_BEFORE = re.compile(
    r"(?:[-+*/^<>=~]|\d\s*:|\\(?:times|cdot|div|le|leq|ge|geq|ne|neq|pm|sqrt|equiv)|\b(?:sqrt|plus|minus|negative|times))\s*$"
)
_DENIED_AFTER = re.compile(
    r"\s(?:(?:is|was)\s(?:not|wrong|incorrect|false|impossible)|(?:is|was)n't|(?:cannot|can't|could\snot)\sbe)\b"
)
_REMARK = re.compile(
    r"\d(?:\s[A-Za-z%]{1,20}){0,3}\s(\((?!or\b|maybe\b|perhaps\b|not\b)[^()\n]{0,200}[A-Za-z]{2}[^()\n]{0,200}\)[.\s*]*)$"
)
"""Words in brackets after the last number, which say where it comes from: 7 fruits (3 apples and 4 pears)."""

_CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")
"""What GSM8K solutions write for a calculator: $<<9*2=18>>18."""

_TIMES = re.compile(r"(?<=[\d)%])\s?x\s?(?=[$\d(.])")
_COMMAND_BEFORE = re.compile(r"\\[A-Za-z]{1,20}\s?$")
_OTHER_VALUE = re.compile(r"([A-Za-z]\s?=\s?[^\s,]{1,40}),?\s(?:and|or)\s$")
_BEFORE = re.compile(r"(?:[-=]{1,2}>|\*\*|:\s?\*)\s*$")
"""Signs that are no operators: an arrow, the end of bold or slanted type."""

_REFERENCE = re.compile(
    r"(?:^|[\s(*#])(?:step|case|figure|table|equation|section|example|lemma|theorem)\s$", re.IGNORECASE
)
"""Words before the number of a part of the text."""

_REFERRING = re.compile(r"\b(?:see|in|from|by|at|after|of|to)$", re.IGNORECASE)

_BULLET = re.compile(r"(?:^|\n)\s*[-+*]\s+$")
_BOUND_BEFORE = re.compile(
    r"(?:\b(?:least|most|than|up\sto|below|above|under|over|between|twice|out\sof|mod|base|divided\sby|divisible\sby"
    r"|except|but|double|triple|choose|log|ln|sin|cos|tan"
    r"|(?:half|root|square|cube|power|log|multiples?|factors?|opposite|reciprocal|inverse|percent|third|quarter)\sof)"
    r"|\d\s+(?:hours?|hrs?|minutes?|mins?|feet|foot|ft|weeks?|days?|months?|years?|pounds?|dollars?)\s+(?:and)?"
    r"|\d\s+(?:to|of|in))\s*$",
    re.IGNORECASE,
)
_FACTOR_AFTER = re.compile(
    r"\s*(?:[*_]{0,2})\s*(?:(?:thousand|million|billion|trillion|hundred|dozen|half|halves|thirds?|quarters?|squared|cubed"
    r"|factorial|out\sof(?!\spocket)|choose|modulo|mod|in\sbase|point\s\d|percent\sof"
    r"|(?:fif|six|seven|eigh|nin|ten|hundred|thousand)ths?"
    r"|or\s(?:more|less|fewer|greater)"
    r"|and\s(?:a|one|two)\s(?:half|third|quarter)s?|at\s(?:least|most))\b)",
    re.IGNORECASE,
)
_OPERATOR_AFTER = re.compile(
    r"\s*(?:[-+*/^]\s*[\w\\(]|[<>=]|pi\b|sqrt\b|\\(?:pi|times|cdot|sqrt|le|leq|ge|geq|ne|neq|equiv)(?![A-Za-z]))"
)
_MATHEMATICAL = re.compile(
    r"(?:\\[A-Za-z]{1,20}|(?<![A-Za-z])(?:sqrt|pi|sin|cos|tan|ln|log|plus|minus|negative|times)(?![A-Za-z])"
    r"|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[-\d+*/^=<>().,!|{}\[\]_%$~:])+"
)
_UNKNOWN = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")


def is_answer(text: str, *, most_words: int) -> bool:
    """Return whether a text reads as a value, and not as a sentence whose letters happen to multiply."""
    value = value_or_none(text)
    if value is None:
        return _PHRASE.fullmatch(text) is not None and len(text.split()) <= most_words + 1
    if text.lower() in NUMBER_WORDS:
        return True
    if isinstance(value, Text):
        return len(value.words.split()) <= most_words
    text = _ENVIRONMENT.sub(" ", text)
    if isinstance(value, Quantity) and value.unit is not None:
        text = text.partition(value.unit.split()[0])[0]
    return all(word in FUNCTIONS or word.lower() in _PLAIN_WORDS for word in _WORD.findall(text))


def last_number(text: str) -> str | None:
    """Return the last number of a text, or the formula that it is in; None where it is part of something else.

    Digits inside of words are no number, nor is 'not 42'; then the one before is looked at.
    """
    text = _CALCULATION.sub("", text)
    remark = _REMARK.search(text[-600:])
    if remark:
        text = text[: len(text) - len(remark.group(1))]
    spans = [match.span() for match in SPAN.finditer(text)]
    end = len(text)
    for _ in range(50):
        found = re.search(r"\d", text[:end][::-1])
        if found is None:
            return _concluded(text)
        position = end - 1 - found.start()
        span = next((each for each in reversed(spans[-200:]) if each[0] <= position < each[1]), None)
        start, stop = span or _token_around(text, position)
        candidate, before = text[start:stop], text[max(0, start - 80) : start]
        answer = candidate.strip("$") if span else _number_in(candidate, before)
        is_denied_after = candidate.endswith("?") or _DENIED_AFTER.match(text, stop)
        if answer and not _NEGATION.search(before) and not is_denied_after and not _is_reference(before, candidate):
            if _CONCLUSION.search(text, stop):
                return _concluded(text[stop:])
            if span:
                return _joined_spans(text, spans, span)
            return _in_context(text, start, stop, answer)
        end = start
    return None


def _concluded(text: str) -> str | None:
    """The formula in the last sentence that draws a conclusion, where no number is."""
    conclusions = list(_CONCLUSION.finditer(text))
    if not conclusions:
        return None
    last = [match for match in SPAN.finditer(text, conclusions[-1].end())]
    content = next(filter(None, last[-1].groups())).strip() if last else ""
    return content if content and is_answer(content, most_words=2) else None


def _joined_spans(text: str, spans: list[tuple[int, int]], last: tuple[int, int]) -> str:
    """The last formula, with those that 'and' or 'or' join to it: $x = -2$ or $x = 1$."""
    first = spans.index(last)
    joints: list[str] = []
    while first > 0 and len(joints) < 16:
        joint = text[spans[first - 1][1] : spans[first][0]]
        if len(joint) > 12 or not _JOINT.fullmatch(joint) or not (joint.strip(" ,\n") or joints):
            break
        joints.append(joint)
        first -= 1
    contents = [text[start:stop].strip("$") for start, stop in spans[first : spans.index(last) + 1]]
    return contents[0] if len(contents) == 1 else ", ".join(content.strip("\\()[] ") for content in contents)


def _token_around(text: str, position: int) -> tuple[int, int]:
    start = max(text.rfind(space, max(0, position - 200), position) for space in " \t\n") + 1
    start = max(start, position - 200)
    opening = max(text.rfind(bracket, max(0, position - 100), start) for bracket in "([")
    stops = [stop for stop in (text.find(space, position, position + 200) for space in " \t\n") if stop >= 0]
    stop = min(stops, default=min(len(text), position + 200))
    token = text[start:stop]
    if opening >= 0 and token.count(")") + token.count("]") > token.count("(") + token.count("["):
        start = opening  # the last item of a tuple
    command = re.search(r"\S{0,40}\\[A-Za-z]{1,20} $", text[max(0, start - 62) : start])
    if command:
        start -= len(command.group())  # 3\\sqrt 2
    return start, stop


def _number_in(token: str, before: str) -> str | None:
    """The number or formula that a token is, without punctuation and currency; else the last number in it."""
    bare = _stripped(token)
    if bare.count("(") + bare.count("[") != bare.count(")") + bare.count("]"):
        bare = _stripped(bare.strip("()[]"))
    if re.fullmatch(r"[A-Za-z]+\^\{?[23]\}?", bare) and re.search(r"\d\s*$", before):
        return None  # a unit: 24 cm^2
    if re.search(r"\bmod\s?\d", token) or re.match(r"[<>]=?-?[\d.]", bare):
        return None
    if is_answer(bare, most_words=0):
        return bare
    numerals = list(NUMERAL.finditer(token))
    if not numerals or _NEGATION.search(token[: numerals[-1].start()]):
        return None
    return bare if _COMMAND_BEFORE.search(token[: numerals[-1].start()]) else numerals[-1].group()


def _stripped(token: str) -> str:
    """A token without the punctuation around it; the point of .5 is part of the number."""
    bare = token.rstrip(TRIM + ".,;:?$").lstrip(TRIM + ",;:?$")
    return bare if re.match(r"\.\d", bare) else bare.lstrip(TRIM + ".,;:?$")


def _is_reference(before: str, candidate: str) -> bool:
    """Whether a number names a part of the text: 'Step 3:', 'see step 3'; a case or an example may be counted, too."""
    found = _REFERENCE.search(before)
    return found is not None and (candidate[-1] in ".:)" or _REFERRING.search(before[: found.start()]) is not None)


def is_denied(before: str) -> bool:
    """Return whether the words before a value say that it is not the answer: not, rather than, instead of."""
    return _NEGATION.search(before) is not None


def is_multiplied(after: str) -> bool:
    """Return whether the words after a number make another value of it: million, out of, or more, and a half."""
    return _FACTOR_AFTER.match(after) is not None


def _in_context(text: str, start: int, stop: int, answer: str) -> str | None:
    """The number, or the formula around it; None where the words beside it bound or multiply it."""
    line = text.rfind("\n", max(0, start - 200), start) + 1
    before, after = text[max(line, start - 200) : start], text[stop : stop + 40].partition("\n")[0]
    if _BOUND_BEFORE.search(before) or is_multiplied(after):
        return None
    if re.search(r"(?:^|\s)\d{1,20}\s$", before) and "/" not in answer:
        return None  # two numbers side by side
    before = _BEFORE.sub("", before)
    closed = text[stop - 1] in ".,;:"
    operator = None if _BULLET.fullmatch(before) else _OPERATOR_BEFORE.search(before)
    goes_on = not closed and _OPERATOR_AFTER.match(after)
    if operator or goes_on:
        first = _formula_start(text, start, max(line, start - 200))
        if operator and first == start:
            return None
        left = text[first:start].rstrip(TRIM + "$")
        if goes_on or not left.endswith("=") or _names_unknown(left[:-1]):
            formula = text[first : _formula_end(text, stop) if goes_on else stop].strip(TRIM + ".,;:$")
            return None if formula[:1] in tuple("+*/^<>") else formula
        if other := _OTHER_VALUE.search(text[max(line, first - 60) : first]):
            return f"{other.group(1)}, {text[first:stop].strip(TRIM + '.,;:$')}"
    return _extended(text, start, stop, answer)


def _names_unknown(side: str) -> bool:
    """Whether the left side of an equation is more than a name or arithmetic: 2x, x^2, y - 1."""
    side = _TIMES.sub("*", side.rpartition("=")[2].strip(TRIM + "$"))
    return bool(_UNKNOWN.search(side) or "\\" in side) and len(side) > 1 and not re.fullmatch(r"[A-Za-z]_?\w?", side)


def _formula_start(text: str, start: int, least: int) -> int:
    """Where the formula begins that goes on at `start`: tokens without words, up to the end of a sentence."""
    first = start
    for _ in range(40):
        before = text[least:first].rstrip()
        token = before.rpartition(" ")[2]
        if token in ("", "a") or token[-1] in ".,;:" or not _MATHEMATICAL.fullmatch(token[:80]) or len(token) > 80:
            break
        first = least + len(before) - len(token)
    return first


def _formula_end(text: str, stop: int) -> int:
    for _ in range(20):
        token = re.match(r" ?(\S{1,40})(?=\s|$)", text[stop : stop + 48])
        if token is None or not _MATHEMATICAL.fullmatch(token.group(1)):
            break
        stop += token.end()
        if token.group(1)[-1] in ".,;:":
            break
    return stop


def _extended(text: str, start: int, stop: int, answer: str) -> str:
    """The number with what belongs to it: the integer of a mixed number, a percent word, numbers joined by or, and."""
    if re.match(r"\s?(?:%|percent\b|pct\b|\\%)", text[stop : stop + 9]):
        answer += "%"
    mixed = re.search(r"(?:^|\s)(-?\d{1,9}) $", text[max(0, start - 12) : start])
    if mixed and re.fullmatch(r"\d+/\d+", answer):
        return f"{mixed.group(1)} {answer}"
    for _ in range(8):
        joined = _JOINED_LEFT.search(text[max(0, start - 60) : start])
        other = (joined.group(1) or joined.group(2)).strip(TRIM + ".,;:$") if joined else ""
        if joined is None or not NUMERAL.fullmatch(other):
            break
        start = max(0, start - 60) + joined.start()
        answer = f"{other}, {answer}"
    return answer
