"""Texts that mean harm: every grade returns soon, nothing is raised, nothing is executed, the process lives on."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.function import ScoredText
from slipstream.rewards.mathematics.verifier import math

LIMIT_S = 5.0
"""Bound of one grade on a slow and busy machine; measured are 0.3 s at most."""

MILLION = 10**6
LABELS = [
    "72",
    "\\frac{\\pi}{3}",
    "x + 1",
    "(1, 2)",
    "x > 5",
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
    "\\text{yes}",
    "C",
]

BOXED = {
    "towers": [
        "10^{10^{10}}",
        "9**9**9**9",
        "2^{2^{2^{2^{2^{2}}}}}",
        "9^" * 900 + "9",
        "e^" * 900 + "1",
        "\\pi^{\\pi^{\\pi^{\\pi}}}",
    ],
    "factorials": [
        "(10^{9})!",
        "((((5!)!)!)!)!",
        "5" + "!" * 1900,
        "3!" * 900,
        "5000!" * 300,
        "\\binom{10^9}{10^8}",
        "(-1)!",
        "x!!!",
    ],
    "sums of large fractions": [
        "+".join(f"\\frac{{1}}{{{i}!}}" for i in range(1900, 2015)),
        "+".join(f"1/{i}" for i in range(1000, 1250)),
    ],
    "products of large numbers": [
        "\\binom{5000}{2500}" * 100,
        "*".join(["(x+1)^{999}"] * 150),
        "(1+10^{-300})^{10^{9}}",
    ],
    "long numbers": ["9" * 1990, "0." + "1" * 1900, "1e" + "9" * 1900, "9" * MILLION, "1e999999999", "1 000 " * 300],
    "what may begin in many places": [" " * 1900 + "x", "k \\in " * 250, ", " * 900 + "k\\in\\mathbb{Z}x"],
    "deep nesting": [
        "(" * 900 + "1" + ")" * 900,
        "{" * 900 + "1" + "}" * 900,
        "\\sqrt{" * 300 + "1" + "}" * 300,
        "f(" * 600 + ")" * 600,
    ],
    "deep structures": [
        "\\{1," * 400 + "2" + "\\}" * 400,
        "[1," * 400 + "2" + "]" * 400,
        "\\begin{pmatrix}" * 120,
        "\\frac{1}{" * 200 + "1" + "}" * 200,
    ],
    "long rows of signs": [
        "-" * 1900 + "1",
        "|" * 1900,
        "x=" * 900 + "1",
        "x<" * 900 + "1",
        ":" * 1900,
        "\\cup" * 400,
        "'" * 1900,
        "x_" * 900,
        "\\pm" * 600,
    ],
    "long names": [
        "a" * 1900 + "(=5",
        "x_{" + "a" * 1800 + "}=5",
        "f(" + "a," * 800 + ")=5",
        "1  " * 600,
        "|" + "a" * 1800 + "|=5",
    ],
    "many items": [
        "1," * 900 + "1",
        ",".join(f"x_{{{i}}}" for i in range(250)),
        "+".join(f"x_{{{i}}}" for i in range(250)),
    ],
    "hard arguments": [
        "\\sin(10^{10000})",
        "\\arcsin(100)",
        "\\ln 0",
        "\\log_1 5",
        "\\sqrt[0]{5}",
        "\\sqrt[10^9]{5}",
        "0^{-1}",
        "i^{i^{i}}",
        "\\infty-\\infty",
    ],
    "broken LaTeX": [
        "\\frac",
        "\\frac{1",
        "\\sqrt[",
        "\\left.",
        "\\overline{" * 200,
        "0.\\overline{" * 100,
        "\\" * 1900,
        "}{",
        "\\text{" * 200,
        "_",
        "^",
        "\0",
    ],
}
WHOLE = [
    *(
        "{" * MILLION,
        "}" * MILLION,
        "9" * MILLION,
        "#### " + "9" * MILLION,
        "-" * MILLION,
        " " * MILLION,
        "\n" * MILLION,
    ),
    *(
        "$" * MILLION,
        "$1" * 50_000,
        "\\(1" * 50_000,
        "\\[1" * 50_000,
        "(" * MILLION + "5",
        "1," * 100_000,
        "1/" * 100_000,
    ),
    *(
        "\\boxed{" * 50_000,
        "\\boxed{" * 50_000 + "}" * 50_000,
        "\\boxed 1 " * 20_000,
        "\\boxed" * 50_000,
        "#### " * 100_000,
    ),
    *(
        "answer is " * 30_000,
        "Answer:\n" * 30_000,
        "Answer:" + " " * 100_000,
        "3 or " * 50_000,
        "not 5 " * 50_000,
        "or " * 100_000,
    ),
    *(
        "<think>" * 50_000,
        "</think>" * 50_000,
        "\u200b" * MILLION,
        "\u202e" * MILLION,
        "\u0661" * MILLION,
        "\ud83d" * 1000,
        "é" * MILLION,
    ),
    *("A" * MILLION, "a " * 300_000, "\\text{ " * 50_000, "5 " + "word " * 200_000),
]


def graded_in(label: str, response: str) -> float:
    """Grade in this process and return the seconds it took."""
    started = time.perf_counter()
    score = math(ScoredText("", response, label, {}, "stop", 1))
    assert score.reward == 0.0
    return time.perf_counter() - started


@pytest.mark.parametrize(
    "content", [each for contents in BOXED.values() for each in contents], ids=lambda text: text[:24]
)
def test_an_answer_that_would_take_forever_is_refused_before_it_is_computed(content):
    assert max(graded_in(label, f"\\boxed{{{content}}}") for label in LABELS) < LIMIT_S


@pytest.mark.parametrize("response", WHOLE, ids=lambda text: text[:24])
def test_a_response_of_a_million_characters_is_read_once(response):
    assert max(graded_in(label, response) for label in LABELS[:2]) < LIMIT_S


@pytest.mark.parametrize("content", [each for contents in BOXED.values() for each in contents if len(each) < 2000])
def test_a_label_that_means_harm_is_graded_or_refused(content):
    started = time.perf_counter()
    try:
        math(ScoredText("", f"\\boxed{{{content}}}", content, {}, "stop", 1))
    except ValueError as error:
        assert "the label must be a number or a text with an answer" in str(error)
    assert time.perf_counter() - started < LIMIT_S


def payloads(file: Path) -> list[str]:
    """Python, with and without underscores, that leaves a trace in the environment or in a file."""
    statement = "import os;os.environ.update({'SLIPSTREAM_PWNED':'1'})"
    writing = f"open('{file}','w').close()"
    return [
        f'\\pi+len([exec("{statement}")])',
        f'[exec("{statement}")]',
        f'\\begin{{pmatrix}} exec("{statement}") \\\\ 2 \\end{{pmatrix}}',
        f'__import__("os").system("touch {file}")',
        f"\\text{{{writing}}}",
        f"eval(compile('''{statement}''','a','exec'))",
        f"(lambda: {writing})()",
        f'{{exec("{statement}")}}',
        "().__class__.__bases__[0].__subclasses__()",
        f'\\operatorname{{exec}}("{statement}")',
        f"x={writing}",
    ]


def test_python_in_a_response_or_in_a_label_is_text(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_PWNED", raising=False)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    for payload in payloads(tmp_path / "touched"):
        for label in LABELS:
            for response in (f"\\boxed{{{payload}}}", payload, f"#### {payload}", f"The answer is ${payload}$."):
                assert math(ScoredText("", response, label, {}, "stop", 1)).reward == 0.0
        with pytest.raises(ValueError, match="the label must be"):
            math(ScoredText("", payload, f"see {payload}, proved above", {}, "stop", 1))
    assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []


ALPHABET = "0123456789.,-+*/^!_=<>|()[]{}\\$%&:; \nxyei\u200b\u202e\u0662\u221e\u00b2\ud83d"
PIECES = st.sampled_from(
    [
        *(
            "\\boxed{",
            "}",
            "{",
            "\\frac",
            "\\sqrt[",
            "\\begin{pmatrix}",
            "\\end{pmatrix}",
            "\\\\",
            "&",
            "\\text{",
            "####",
        ),
        *(
            "$",
            "\\left(",
            "\\pm",
            "</think>",
            "<think>",
            "answer is",
            "\\cup",
            "\\in",
            "or",
            "1,000",
            "!",
            "^",
            "10",
            "x",
        ),
        *("\\infty", "\\overline{", "\\log_", "_", "%", "|", "\\degree", "cm", ":", "=", "<", "e"),
    ]
)


@given(st.text(alphabet=ALPHABET, max_size=200), st.lists(PIECES, max_size=40).map("".join), st.sampled_from(LABELS))
def test_any_text_is_worth_0_or_1(text, pieces, label):
    for response in (text, f"\\boxed{{{text}}}", pieces, f"\\boxed{{{pieces}}}", text + pieces):
        score = math(ScoredText("", response, label, {}, "stop", 1))
        assert score.reward in (0.0, 1.0)
        assert score.answer is None or score.answer.strip()


@given(st.text(max_size=200), st.integers(-(10**20), 10**20))
def test_any_text_before_the_mark_leaves_the_answer_alone(noise, value):
    if "<think" not in noise and "</s>" not in noise:
        for response in (f"{noise}\n#### {value:,}", f"{noise}\n\n\\boxed{{{value}}}"):
            assert math(ScoredText("", response, value, {}, "stop", 1)).reward == 1.0


def test_the_pool_outlives_them_all(with_pool, trajectory):
    responses = [
        "\\boxed{10^{10^{10}}}",
        "\\boxed{(10^{9})!}",
        "{" * MILLION,
        "9" * MILLION,
        "\\boxed{[exec('import os')]}",
    ]
    items = [trajectory(response) for response in ("\\boxed{2}", *responses, "\\boxed{2}")]
    results = with_pool("", lambda pool: pool.score(items), function="math", timeout_s=20)
    assert [result.reward for result in results] == [1.0, *[0.0] * len(responses), 1.0]
    assert max(result.seconds for result in results) < LIMIT_S
