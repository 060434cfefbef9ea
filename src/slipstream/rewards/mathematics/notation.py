"""From the many ways to write a mathematical answer to one: characters first, then LaTeX commands, then tokens.

First stage of the verifier. Everything here is a linear pass over a text of bounded length, and nothing fails: what has
no meaning stays as it is and is refused by the parser.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from slipstream.rewards.mathematics.characters import plain_characters
from slipstream.rewards.mathematics.numerals import MULTIPLIERS, NUMBER_WORDS, number_in_words
from slipstream.rewards.mathematics.units import foreign_units, is_unit

_SIZING = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:text)?color\s?\{[a-zA-Z]{0,20}\}|"
    r"\\(?:displaystyle|textstyle|scriptstyle|left|right|middle|[bB]igg?[lrm]?|limits|nolimits|phantom|boldsymbol|bm|pmb|ensuremath|rm|bf|underline|cancel|boxed"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge)"
    r"(?![A-Za-z])|\\tag\s?\{[^{}]{0,20}\}|^\s*\\(?:therefore|because|Rightarrow|implies)(?![A-Za-z])"
    r"|(?<=\S)\s*\\(?:checkmark|blacksquare|square|Box|qed)\s*$"
)
_QUOTED = re.compile(r"([`\"']{1,3})([^`\"']+)\1")
_ROW_SPACE = re.compile(r"\\\\\s?\[\s?-?[\d.]{1,5}\s?(?:pt|em|ex|mm|cm|in)\s?\]")
_TRANSPOSED = re.compile(r"(?<=[)\]])\s?\^\s?\{?\s?(?:T|\\(?:top|intercal)|\\(?:mathrm|mathsf|text)\{T\})\s?\}?$")
_OUTWARD = re.compile(r"(?<![^\s(])([\[\]])([^\[\]()]{1,80}[,;][^\[\]()]{1,80})([\[\]])(?=\s*(?:$|\\cup))")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z,;:!%$(){}\[\]])")
_SPEED = re.compile(r"(?<=[\d}])\s*(m/s)\b")
_DIGIT_GROUP = re.compile(r"(?<=\d)\s?(?:\{,\}|\{\s?,\s?\}|,?\\!|\\,|_|')\s*(?=\d{3}(?!\d))")
_SPACED_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3}(?![\d,/]))+")
_SPACE = re.compile(
    r"\\[,;:!> ]|~|\\(?:q?quad|thinspace|medspace|thickspace|enspace|space)(?![A-Za-z])|\\[hv]space\*?\{[^{}]{0,20}\}"
)
_WRAPPER = re.compile(
    r"\\(?:text(?:normal|rm|bf|it|sf|tt|up)?|mbox|hbox|fbox|math(?:rm|bf|it|sf|tt|normal)|operatorname\*?|emph)\s*\{([^{}]*)\}"
)
_UNIT_EXPONENT = re.compile(
    r"(\\(?:text(?:rm|normal)?|mathrm|mbox)\s*\{[^{}]{0,20})\^\s?\{\s?(-?\d)\s?\}(?=[^{}]{0,20}\})"
)
_UNBRACED_WRAPPER = re.compile(r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it|rm)?|mbox)(?![A-Za-z]|\s*\{)")
_DEGREE = re.compile(
    r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\{\s*\\degree\s*\})|\\degree(?![A-Za-z])|\\circ(?=\s*$)"
)
_ORDINAL = re.compile(r"(?<=\d)\s?\^\s?\{?\s?(?:\\(?:text|mathrm)\s?\{)?(?:st|nd|rd|th)\s?\}{1,2}")
_NOT_EQUAL = re.compile(r"\\not\s*(?:=|\\eq(?![A-Za-z]))")
_LEADING_CURRENCIES = {
    "dollars": re.compile(r"^\\\$(?=\s?[\d.])"),
    "euros": re.compile("^\u20ac"),
    "pounds sterling": re.compile("^\u00a3"),
    "rs": re.compile("^(?:Rs\\.?|\u20b9)(?=\\s?\\d)"),
}
_LETTER_TIMES = re.compile(r"(?<=[\d)])\s{1,4}x\s{1,4}(?=[\d(])|(?<=\d)x(?=10\^)")
_FOOT = re.compile(r"(?<=\d)\s?'(?=\s?\d|$)")
_INCH = re.compile(r"(?<=\d)\s?(?:\"|'')$")
_NUMBER_OF_CHOICES = re.compile(
    r"(?:\{\s?\})?[_^]\s?\{?\s?(\w{1,9})\s?\}?\s?(?:\\mathrm\s?\{C\}|C)\s?_\s?(?:\{\s?(\w{1,9})\s?\}|(\w))"
    r"|(?<![\w\\])(\d{1,9})\s?C\s?(\d{1,9})(?!\w)|(?<![\w\\])C\s?\(\s?(\w{1,9})\s?,\s?(\w{1,9})\s?\)"
)
_BASE = re.compile(
    r"(?<![\w.])(-?[\dA-F]{1,200})\s?(?:\\text\{)?\s?\(?\s?(?:in\s)?base[\s-]\s?\}?\s?(\d{1,2}|[a-z]{3,7})\s?\)?\s?\}?$"
)
_ENDLESS = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{2,40})\s?\.\.\.(?!\.)")
_REALS = re.compile(r"\\(?:math(?:bf|bb)|Bbb|R)\s?(?:\{\s?R\s?\}|(?<=R)(?![A-Za-z{]))")
_CHOOSE = re.compile(r"\{([^{}\\]{1,40})\\choose([^{}\\]{1,40})\}")
_REPEATING = re.compile(
    r"(?<!\d)(\d{0,60})\.(\d{0,60})(?:\\(?:overline|bar|dot)\s*\{?(\d{1,60})\}?|(?<=\.)\((\d{1,60})\))"
)
_COMMANDS = {
    "dfrac": r"\frac ",
    "tfrac": r"\frac ",
    "nicefrac": r"\frac ",
    "sfrac": r"\frac ",
    "xfrac": r"\frac ",
    "backslash": r"\setminus ",
    "varepsilon": r"\epsilon ",
    "varphi": r"\phi ",
    "vartheta": r"\theta ",
    "cfrac": r"\frac ",
    "dbinom": r"\binom ",
    "tbinom": r"\binom ",
    "cdot": "*",
    "times": "*",
    "ast": "*",
    "div": "/",
    "le": "<=",
    "leq": "<=",
    "leqslant": "<=",
    "lt": "<",
    "ge": ">=",
    "geq": ">=",
    "geqslant": ">=",
    "gt": ">",
    "ne": "!=",
    "neq": "!=",
    "equiv": "=",
    "simeq": r"\approx ",
    "thickapprox": r"\approx ",
    "colon": ":",
    "lvert": "|",
    "rvert": "|",
    "vert": "|",
    "lbrace": r"\{",
    "rbrace": r"\}",
    "lbrack": "[",
    "rbrack": "]",
    "lparen": "(",
    "rparen": ")",
    "varnothing": r"\emptyset ",
    "land": ",",
    "lor": ",",
    "wedge": ",",
    "vee": ",",
    "percent": "%",
    "euro": "$",
    "pounds": "$",
    "dollar": "$",
    "ldots": "...",
    "dots": "...",
    "cdots": "...",
}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_TRAILING = re.compile(r"(?<!\.)(?:(?<!\.)\.(?!\.)|[,;:\\\s]){1,20}$")
_CURRENCY = re.compile(r"\\?\$|[\u20ac\u00a3\u00a5]")

FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "ln", "log", "lg", "exp", "sqrt", "abs"}
    | {"arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "cis"}
)
_SYNONYMS = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "infinity": "infty", "inf": "infty", "lg": "log"}
_NAMES = sorted((FUNCTIONS | set(_SYNONYMS) | {"pi"}) - {"abs", "inf"}, key=len, reverse=True)
_LETTERS = re.compile("|".join(_NAMES) + "|[A-Za-z]")
_SEPARATOR_WORDS = frozenset({"and", "or", "und", "oder", "et"})

FEWEST_CUT_PLACES = 6
"""Digits after the point of a decimal with an ellipsis that may be read as it is."""

OPERATOR_WORDS = {"minus": "-", "negative": "-", "plus": "+", "times": "*", "over": "/"}

_SHORT_ANSWERS = frozenset({"yes", "no", "odd"})
_LETTER_RUN = re.compile("[A-Za-z]+")
_MATHEMATICAL = re.compile(r"[\d\\+*^=<>|]")

UNIT_NAMES = frozenset(
    {"mm", "cm", "km", "mg", "kg", "lb", "lbs", "oz", "in", "ft", "yd", "mi", "ml", "mph", "kph", "sec", "min"}
    | {"hr", "hrs", "am", "pm", "deg", "rad", "usd", "eur", "st", "nd", "rd", "th"}
)
"""Short words that are units after a number, where other short words are products of variables."""


class Token(NamedTuple):
    """One symbol of an answer. `kind` is number, name, word, text, environment or operator."""

    kind: str
    text: str


_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<grouped>[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,]))"
    r"|(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+(?![\w.]))?)"
    r"|\\text\{(?P<text>[^{}]*)\}"
    r"|(?P<environment>\\(?:begin|end)\s*\{[A-Za-z*]+\})"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<operator>\\[{}\\|]|<=|>=|!=|:=|==|\.\.\.|[^\s\w])"
    r"|(?P<other>.)",
    re.DOTALL,
)


@lru_cache(maxsize=1024)
def simplify(text: str) -> str:
    """Return an answer with one command for each meaning, without sizes, spacing, currency and thousands marks.

    Text commands become \\text{...}, degrees \\degree, relations their ASCII operators. For texts of bounded length:
    the last thousand are remembered.
    """
    text = plain_characters(text).strip(" *\n").replace("**", "^")
    quoted = _QUOTED.fullmatch(text)
    text = _SIZING.sub(" ", quoted.group(2).strip() if quoted else text)
    text = _TRANSPOSED.sub("", _ROW_SPACE.sub(r"\\\\ ", text).strip())
    text = _REALS.sub(r"\\mathbb{R}", _OUTWARD.sub(_outward_interval, text))
    text = _NOT_EQUAL.sub("!=", _DIGIT_GROUP.sub("", text))
    text = _FOOT.sub(r"\\text{ feet} ", _INCH.sub(r"\\text{ inches}", text))
    text = foreign_units(_BASE.sub(_based, text))
    for unit, currency in _LEADING_CURRENCIES.items():
        text = currency.sub(rf"\\text{{{unit}}}", text)
    if "\\begin" not in text:  # no rows: a command that was escaped twice
        text = _DOUBLED.sub(r"\\", text)
    text = text.replace("\\\\", "\\\\ ")  # a row ends; what follows it is no command
    text = _SPACE.sub(" ", text.replace("\\\\ ", "\0")).replace("\0", "\\\\ ")
    text = _SPEED.sub(r"\\text{\1}", text)
    text = _DEGREE.sub(r"\\degree ", text)
    text = _LETTER_TIMES.sub("*", text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _ORDINAL.sub("", text))
    text = _NUMBER_OF_CHOICES.sub(_binomial, text)
    text = _REPEATING.sub(_repeating_decimal, _UNIT_EXPONENT.sub(r"\1^\2", text))
    text = _WRAPPER.sub(_unwrap, text)
    text = _UNBRACED_WRAPPER.sub(" ", text)
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match.group(1), match.group()), text)
    text = _ENDLESS.sub(_endless_decimal, text)
    text = _CURRENCY.sub(" ", text).replace("\\%", "%").replace("\\(", "").replace("\\)", "")
    text = text.replace("\\[", "").replace("\\]", "").replace("\\#", "").replace("\\&", "&").replace("\\_", "_")
    text = _SPACED_GROUPS.sub(lambda match: match.group().replace(" ", ""), text)
    return _TRAILING.sub("", text).strip()


def _unwrap(match: re.Match[str]) -> str:
    content = match.group(1).strip()
    command = match.group().partition("{")[0]
    if command.startswith("\\operatorname") and content in FUNCTIONS | set(_SYNONYMS):
        return f"\\{content} "
    if len(content) == 1 and is_unit(content) and command == "\\mathrm":
        return f"\\text{{{content}}}"
    if len(content) == 1 and content.isalpha() and not command.startswith(("\\text", "\\mbox")):
        return f" {content} "
    return f"\\text{{{match.group(1)}}}"


def _outward_interval(match: re.Match[str]) -> str:
    """]0, 1] as (0, 1]: the brackets of an interval that are turned away from it leave its end out."""
    left, inside, right = match.groups()
    return (
        match.group()
        if left + right == "[]"
        else f"{'[' if left == '[' else '('}{inside}{']' if right == ']' else ')'}"
    )


def _based(match: re.Match[str]) -> str:
    """'101 in base 2' as 101_{2}."""
    digits, base = match.groups()
    number = base if base.isdigit() else number_in_words(base)
    return match.group() if number is None else f"{digits}_{{{number}}}"


def _binomial(match: re.Match[str]) -> str:
    """{}_{10}C_{3}, 10C3 and C(10, 3) as a binomial coefficient."""
    total, chosen = [group for group in match.groups() if group]
    return rf"\binom{{{total}}}{{{chosen}}}"


def _endless_decimal(match: re.Match[str]) -> str:
    """0.1666... with its last digit, or 0.1212... with its two, repeated; a longer decimal with its end cut off.

    What else is meant by a short one, such as 1.41..., is not known: it stays what it is.
    """
    whole, places = match.groups()
    repeated = re.fullmatch(r"(\d*?)(\d)\2{2,}", places) or re.fullmatch(r"()(\d\d)\2{1,}", places)
    if repeated:
        return _repeated(whole, *repeated.groups())
    return f"{whole}.{places}" if len(places) >= FEWEST_CUT_PLACES else match.group()


def _repeating_decimal(match: re.Match[str]) -> str:
    """0.1\\overline{6} or 0.(6) as a fraction."""
    whole, fixed, period, bracketed = match.groups()
    return _repeated(whole, fixed, period or bracketed)


def _repeated(whole: str, fixed: str, period: str) -> str:
    """The fraction of a decimal: (16 - 1) / 90 with no digits before the point, 1 that stays and 6 that repeats."""
    start = int(whole + fixed or "0")
    return rf"\frac{{{int(f'{start}{period}') - start}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def tokenize(text: str) -> list[Token]:
    """Split a simplified answer into tokens.

    A comma between digits is a thousands mark outside brackets, (100,101) being two numbers. Words joined by 'and' or
    'or' become a list, a text command that holds a number or a list is read like what stands outside of it.
    """
    return _operators_for_words(list(_tokens(text)))


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    prose = not _MATHEMATICAL.search(text) and any(map(_is_word, _LETTER_RUN.findall(text)))
    depth = position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            break
        kind, value = match.lastgroup or "", match.group(match.lastgroup or 0)
        if kind == "grouped" and (depth or (tokens and tokens[-1].text == "_")):
            value = value.partition(",")[0]
            position, kind = position + len(value), "number"
        else:
            position = match.end()
        if kind in ("grouped", "number"):
            tokens.append(Token("number", value.replace(",", "")))
        elif kind == "text":
            tokens += _text_tokens(value, tokens)
        elif kind == "command":
            tokens.append(Token("name", "\\" + _SYNONYMS.get(value, value)))
        elif kind == "letters":
            tokens += _multiplied(value, tokens) or _letter_tokens(value, tokens[-1] if tokens else None, prose)
        elif kind == "environment":
            tokens.append(Token(kind, "".join(value.split())))
        elif kind != "space":
            depth += (value in ("(", "[", "\\{")) - (value in (")", "]", "\\}"))
            tokens.append(Token("operator", value))
    return tokens


def _operators_for_words(tokens: list[Token]) -> list[Token]:
    """Words such as 'minus' between values, or before one, as the operators they are."""
    return [
        Token("operator", OPERATOR_WORDS[token.text.lower()])
        if token.kind in ("word", "text") and token.text.lower() in OPERATOR_WORDS and after.kind in ("number", "name")
        else token
        for token, after in zip(tokens, [*tokens[1:], Token("end", "")], strict=False)
    ]


def _multiplied(letters: str, before: list[Token]) -> list[Token]:
    """The factor of 'million' after a number; nothing for other words."""
    lower = letters.lower()
    factor = MULTIPLIERS.get(lower) or MULTIPLIERS.get(lower.removesuffix("s"))
    if factor is None or not before or before[-1].kind != "number":
        return []
    return [Token("operator", "*"), Token("number", str(factor))]


def _text_tokens(content: str, before: list[Token]) -> list[Token]:
    stripped = content.strip()
    first, _, rest = stripped.partition(" ")
    if multiplied := _multiplied(first, before):
        return multiplied + (_text_tokens(rest, multiplied) if rest.strip() else [])
    if is_unit(stripped) and _takes_unit(before):
        return [Token("text", stripped)]
    words = stripped.strip(",;. ").lower()
    if words in _SEPARATOR_WORDS or not words:
        return [Token("operator", ",")] if stripped else []
    if not any(map(str.isalpha, stripped)) or re.search(r"[,;\d%]|\b(?:and|or|percent)\b", stripped):
        return tokenize(stripped)
    if words == "infinity":
        return [Token("name", "\\infty")]
    letter = stripped.strip("()")
    return [Token("name", letter)] if len(letter) == 1 else [Token("text", stripped)]


def _takes_unit(before: list[Token]) -> bool:
    """Whether a unit may follow: after a number or a bracket, or after a unit and a sign of multiplication."""
    if not before:
        return False
    last = before[-1]
    is_joined = len(before) > 1 and last.text in ("*", "/") and before[-2].kind == "text"
    return last.kind in ("number", "text") or last.text in (")", "}", "\\pi") or is_joined


def _letter_tokens(letters: str, before: Token | None, prose: bool) -> list[Token]:
    """Names for a product of variables or a known function, a word for what reads like one, or stands in prose."""
    lower = letters.lower()
    if lower in _SEPARATOR_WORDS:
        return [Token("operator", ",")]
    if lower in ("percent", "pct", "percentage"):
        return [Token("operator", "%")]
    if lower in UNIT_NAMES and before is not None and (before.kind == "number" or before.text in ")}%"):
        return [Token("word", letters)]
    if lower in ("infinity", "inf") or (letters in FUNCTIONS):
        return [Token("name", "\\" + _SYNONYMS.get(lower, lower))]
    if letters == "U" and before is not None and before.text in (")", "]"):
        return [Token("name", "\\cup")]
    if prose or _is_word(letters):
        return [Token("word", letters)]
    parts = _LETTERS.findall(letters)
    return [Token("name", part if len(part) == 1 else "\\" + _SYNONYMS.get(part, part)) for part in parts]


def _is_word(letters: str) -> bool:
    """Whether a run of letters is no product: four or more, three of which one is a capital, or a numeral."""
    if letters.lower() in NUMBER_WORDS or letters.lower() in _SHORT_ANSWERS:
        return True
    if len(letters) < 3 or (len(letters) == 3 and letters.islower()):
        return False
    parts = _LETTERS.findall(letters)
    singles = sum(len(part) == 1 for part in parts)
    return singles == len(parts) or singles > 2
