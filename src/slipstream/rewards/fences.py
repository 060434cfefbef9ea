"""Fenced blocks in the Markdown that models write."""

import re
import textwrap

# Possessive, so that it takes linear time on any text. Indented fences are those of list items; what stands before a
# fence may be the '>' of a quotation, or words that a model puts before its code.
_FENCE = re.compile(r"^([^`~\n]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)([^\n`]*+)$", re.MULTILINE)
_QUOTATION = re.compile(r"^[ \t]*(?:>[ \t]?)+", re.MULTILINE)
_LANGUAGE = re.compile(r"\{?\.?([\w+#.-]*)")
_PYTHON = re.compile(r"(py|python)[\d.]+")
_INLINE = re.compile(r"`[^`\n]*+`")
_TEXT_MARK = re.compile("'''|\"\"\"")

_Block = tuple[re.Match[str], int, int]
"""The fence that opens a block, and where it ends: without and with the fence that closes it."""


def fenced_blocks(text: str, languages: set[str]) -> list[str]:
    """Return the contents of the fenced blocks in some of these languages, in order; "" is a fence that names none.

    A block is closed by a fence of at least its length and kind that names no language, as in CommonMark, but not
    within a text of three quotation marks if it is closed after that as well. One that is not closed reaches to the
    end of the text: a model that forgets the fence, or is cut, has written it all the same. Languages are compared in
    lower case, without the version of Python and what may follow a name (`python3.11`, `python:main.py`, `{.python}`).
    """
    return [_content(text, opened, end) for opened, end, _ in _blocks(text) if _language(opened) in languages]


def without_code(text: str) -> str:
    """The text with spaces in place of what stands in fenced blocks and inline code; of the same length."""
    pieces = []
    position = 0
    for opened, _, end in _blocks(text):
        pieces += [text[position : opened.start(2)], " " * (end - opened.start(2))]
        position = end
    return _INLINE.sub(lambda code: " " * len(code[0]), "".join([*pieces, text[position:]]))


def _blocks(text: str) -> list[_Block]:
    fences = list(_FENCE.finditer(text))
    blocks: list[_Block] = []
    position = 0
    while position < len(fences):
        opened = fences[position]
        position += 1
        if not _opens(opened):
            continue
        closing = _closing(text, fences, position)
        if closing is None:
            blocks.append((opened, len(text), len(text)))
            break
        blocks.append((opened, fences[closing].start(), fences[closing].end(2)))
        position = closing + 1
    return blocks


def _closing(text: str, fences: list[re.Match[str]], position: int) -> int | None:
    """The place of the fence that closes the block opened by the one before `position`."""
    opened = fences[position - 1]
    first = inside = None
    read = opened.end()
    for place in range(position, len(fences)):
        fence = fences[place]
        if not _closes(fence, opened):
            if first is not None:
                break  # the next block begins, so the first was the end of this one
            continue
        for mark in _TEXT_MARK.finditer(text, read, fence.start()):
            inside = mark[0] if inside is None else None if inside == mark[0] else inside
        read = fence.end()
        if inside is None:
            return place
        first = place if first is None else first
    return first


def _opens(fence: re.Match[str]) -> bool:
    """Words may stand before a fence of backticks that names a language and nothing else."""
    if not _QUOTATION.sub("", fence[1]).strip():
        return True
    return fence[2][0] == "`" and bool(_language(fence)) and not fence[4].strip()


def _closes(fence: re.Match[str], opened: re.Match[str]) -> bool:
    """Whether a fence can close a block. A tag, such as </answer>, may follow on its line."""
    same_kind = fence[2][0] == opened[2][0] and len(fence[2]) >= len(opened[2])
    before = _QUOTATION.sub("", fence[1]) if _is_quoted(opened) else fence[1]
    return same_kind and not before.strip() and (not fence[3] or fence[3].startswith("<"))


def _is_quoted(fence: re.Match[str]) -> bool:
    return _QUOTATION.fullmatch(fence[1]) is not None


def _language(fence: re.Match[str]) -> str:
    named = _LANGUAGE.match(fence[3].lower())
    name = named[1] if named else ""
    version = _PYTHON.fullmatch(name)
    return version[1] if version else name


def _content(text: str, opened: re.Match[str], end: int) -> str:
    content = text[opened.end() + 1 : end]
    return textwrap.dedent(_QUOTATION.sub("", content) if _is_quoted(opened) else content)
