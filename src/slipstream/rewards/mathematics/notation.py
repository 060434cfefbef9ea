"""From the many ways to write a mathematical answer to one: characters first, then LaTeX commands, then tokens.

First stage of the verifier. Everything here is a linear pass over a text of bounded length, and nothing fails: what has
no meaning stays as it is and is refused by the parser.
"""

import re
import unicodedata
from functools import lru_cache
from typing import NamedTuple

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
    "\u03c0": r"\pi ",
    "\u03b8": r"\theta ",
    "\u03b1": r"\alpha ",
    "\u03b2": r"\beta ",
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
    "\u211d": r"\mathbb{R}",
    "\u2026": "...",
    "\u3001": ",",
    "\u3002": ".",
    "\u00bd": r"\frac{1}{2}",
    "\u00bc": r"\frac{1}{4}",
    "\u00be": r"\frac{3}{4}",
    "\u2153": r"\frac{1}{3}",
    "\u2154": r"\frac{2}{3}",
}
_SUPERSCRIPTS = dict(
    zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a", "0123456789-+", strict=True)
)
_NOT_ASCII = re.compile(rf"([{''.join(_SUPERSCRIPTS)}]+)|[^\x00-\x7f]")

_AREA = re.compile(r"(?<=\d)(\s?)([kcdm]?m|ft|in)([\u00b2\u00b3])(?![\w(])")

_SIZING = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:text)?color\s?\{[a-zA-Z]{0,20}\}|"
    r"\\(?:displaystyle|textstyle|scriptstyle|left|right|middle|[bB]igg?[lrm]?|limits|nolimits|phantom|boldsymbol|rm|bf|underline|cancel|boxed"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge)"
    r"(?![A-Za-z])"
)
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z,;:!%$(){}\[\]])")
_SPEED = re.compile(r"(?<=[\d}])\s*(m/s)\b")
_DIGIT_GROUP = re.compile(r"(?<=\d)\s?(?:\{,\}|\{\s?,\s?\}|,?\\!|\\,)\s*(?=\d{3}(?!\d))")
_SPACED_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3}(?![\d,/]))+")
_SPACE = re.compile(
    r"\\[,;:!> ]|~|\\(?:q?quad|thinspace|medspace|thickspace|enspace|space)(?![A-Za-z])|\\[hv]space\*?\{[^{}]{0,20}\}"
)
_WRAPPER = re.compile(
    r"\\(?:text(?:normal|rm|bf|it|sf|tt|up)?|mbox|hbox|fbox|math(?:rm|bf|it|sf|tt|normal)|operatorname\*?|emph)\s*\{([^{}]*)\}"
)
_UNBRACED_WRAPPER = re.compile(r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it|rm)?|mbox)(?![A-Za-z]|\s*\{)")
_DEGREE = re.compile(
    r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\{\s*\\degree\s*\})|\\degree(?![A-Za-z])|\\circ(?=\s*$)"
)
_ORDINAL = re.compile(r"(?<=\d)\s?\^\s?\{?\s?(?:\\(?:text|mathrm)\s?\{)?(?:st|nd|rd|th)\s?\}{1,2}")
_NOT_EQUAL = re.compile(r"\\not\s*(?:=|\\eq(?![A-Za-z]))")
_LEADING_CURRENCY = (re.compile(r"^\\\$(?=\s?[\d.])"), re.compile("^\u20ac"), re.compile("^\u00a3"))
_LETTER_TIMES = re.compile(r"(?<=[\d)])\s{1,4}x\s{1,4}(?=[\d(])|(?<=\d)x(?=10\^)")
_CHOOSE = re.compile(r"\{([^{}\\]{1,40})\\choose([^{}\\]{1,40})\}")
_REPEATING = re.compile(r"(?<!\d)(\d{0,60})\.(\d{0,60})\\(?:overline|bar|dot)\s*\{?(\d{1,60})\}?")
_COMMANDS = {
    "dfrac": r"\frac ",
    "tfrac": r"\frac ",
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
    | {"arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"}
)
_SYNONYMS = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "infinity": "infty", "inf": "infty", "lg": "log"}
_NAMES = sorted((FUNCTIONS | set(_SYNONYMS) | {"pi"}) - {"abs", "inf"}, key=len, reverse=True)
_LETTERS = re.compile("|".join(_NAMES) + "|[A-Za-z]")
_SEPARATOR_WORDS = frozenset({"and", "or", "und", "oder", "et"})

OPERATOR_WORDS = {"minus": "-", "negative": "-", "plus": "+", "times": "*", "over": "/"}

NUMBER_WORDS = {
    **{"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6},
    **{"seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12},
}
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
    if "\uff01" <= character <= "\uff5e":  # full-width forms of the ASCII characters
        return chr(ord(character) - 0xFEE0)
    return character


@lru_cache(maxsize=1024)
def simplify(text: str) -> str:
    """Return an answer with one command for each meaning, without sizes, spacing, currency and thousands marks.

    Text commands become \\text{...}, degrees \\degree, relations their ASCII operators. For texts of bounded length:
    the last thousand are remembered.
    """
    text = plain_characters(text).strip(" *\n").replace("**", "^")
    text = _SIZING.sub(" ", text)
    text = _NOT_EQUAL.sub("!=", _DIGIT_GROUP.sub("", text))
    for currency, unit in zip(_LEADING_CURRENCY, ("dollars", "euros", "pounds sterling"), strict=True):
        text = currency.sub(rf"\\text{{{unit}}}", text)
    if "\\begin" not in text:  # no rows: a command that was escaped twice
        text = _DOUBLED.sub(r"\\", text)
    text = text.replace("\\\\", "\\\\ ")  # a row ends; what follows it is no command
    text = _SPACE.sub(" ", text.replace("\\\\ ", "\0")).replace("\0", "\\\\ ")
    text = _SPEED.sub(r"\\text{\1}", text)
    text = _DEGREE.sub(r"\\degree ", text)
    text = _LETTER_TIMES.sub("*", text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _ORDINAL.sub("", text))
    text = _REPEATING.sub(_repeating_decimal, text)
    text = _WRAPPER.sub(_unwrap, text)
    text = _UNBRACED_WRAPPER.sub(" ", text)
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match.group(1), match.group()), text)
    text = _CURRENCY.sub(" ", text).replace("\\%", "%").replace("\\(", "").replace("\\)", "")
    text = text.replace("\\[", "").replace("\\]", "").replace("\\#", "").replace("\\&", "&").replace("\\_", "_")
    text = _SPACED_GROUPS.sub(lambda match: match.group().replace(" ", ""), text)
    return _TRAILING.sub("", text).strip()


def _unwrap(match: re.Match[str]) -> str:
    content = match.group(1).strip()
    command = match.group().partition("{")[0]
    if command.startswith("\\operatorname") and content in FUNCTIONS | set(_SYNONYMS):
        return f"\\{content} "
    if len(content) == 1 and content.isalpha() and not command.startswith(("\\text", "\\mbox")):
        return f" {content} "
    return f"\\text{{{match.group(1)}}}"


def _repeating_decimal(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction it is: (16 - 1) / 90."""
    whole, fixed, period = match.groups()
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
            tokens += _text_tokens(value)
        elif kind == "command":
            tokens.append(Token("name", "\\" + _SYNONYMS.get(value, value)))
        elif kind == "letters":
            tokens += _letter_tokens(value, tokens[-1] if tokens else None, prose)
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


def _text_tokens(content: str) -> list[Token]:
    stripped = content.strip()
    words = stripped.strip(",;. ").lower()
    if words in _SEPARATOR_WORDS or not words:
        return [Token("operator", ",")] if stripped else []
    if not any(map(str.isalpha, stripped)) or re.search(r"[,;\d%]|\b(?:and|or|percent)\b", stripped):
        return tokenize(stripped)
    if words == "infinity":
        return [Token("name", "\\infty")]
    letter = stripped.strip("()")
    return [Token("name", letter)] if len(letter) == 1 else [Token("text", stripped)]


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
