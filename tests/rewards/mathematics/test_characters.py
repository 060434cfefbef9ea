"""Characters of other scripts and of typography in ASCII and LaTeX."""

import pytest

from slipstream.rewards.mathematics.characters import plain_characters
from slipstream.rewards.mathematics.equivalence import same_answer


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("72 is it", "72 is it"),
        ("\u06f1\u06f2", "12"),
        ("\u0660\u066b\u0665", "0.5"),
        ("x\u00b9\u2070", "x^{10}"),
        ("x\u2081\u2082", "x_{12}"),
        ("\u215e", "\\frac{7}{8}"),
        ("\u03bb\u0394", "\\lambda \\Delta "),
        ("\U0001d465", "x"),
        ("\u2124", "\\mathbb{Z}"),
        ("90\u00ba", "90^\\circ "),
        ("7\u200b2", "72"),
    ],
)
def test_other_characters_become_ascii(text, plain):
    assert plain_characters(text) == plain


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        *(("2\\frac{1}{2}", "2\u00bd"), ("\\frac15", "\u2155"), ("\\sqrt[3]{2}", "\u221b2"), ("20", "20\u2103")),
        *(("x_1", "x\u2081"), ("\\varphi", "\u03c6"), ("\\phi", "\u03d5"), ("\\varepsilon", "\u03b5")),
        *(("x \\in \\mathbb{Z}", "x \u2208 \u2124"), ("2\\lambda+\\mu", "2\u03bb + \u03bc"), ("72", "72 \u2705")),
        ("\\mathbb{R}\\setminus\\{0\\}", "\u211d\u2216{0}".replace("{0}", "\\{0\\}")),
    ],
)
def test_an_answer_in_characters_is_the_one_in_commands(gold, answer):
    assert same_answer(gold, answer)
