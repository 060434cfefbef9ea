"""reasoning-gym's scoring, in which no answer is evaluated: payloads for each task that used to."""

import contextlib
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards import reasoning
from slipstream.rewards.formulas import exact_number
from slipstream.rewards.function import ScoredText
from slipstream.rewards.reasoning import REPLACED, gym, read_literal, read_symbolic, reasoning_gym, sympy

SOURCE = Path(__file__).resolve().parents[2] / "src"


def grade(answer: str, entry: dict[str, Any]) -> float:
    return reasoning_gym(ScoredText("", answer, None, entry, "stop", 1))


def entries(task: str, count: int = 4) -> list[dict[str, Any]]:
    dataset = gym.create_dataset(task, size=count, seed=5)
    return [dataset[index] for index in range(count)]


@pytest.mark.parametrize("task", REPLACED)
def test_right_answers_are_still_right_and_wrong_ones_wrong(task: str) -> None:
    # An answer with an integral sign in it solves nothing; the generator writes some.
    rows = [entry for entry in entries(task) if "Integral" not in entry["answer"]]
    assert [grade(entry["answer"], entry) for entry in rows] == [1.0] * len(rows)
    assert all(grade("1 + 1", entry) <= 0.05 for entry in rows)


def test_other_ways_to_write_a_right_answer_still_count_as_the_tasks_have_it() -> None:
    (spiral,) = entries("spiral_matrix", 1)
    assert grade(repr(spiral["answer"].split()), spiral) == 0.1
    (insertion,) = entries("string_insertion", 1)
    assert grade(repr(list(insertion["answer"])), insertion) == 0.1
    (integral,) = entries("simple_integration", 1)
    assert grade(f"({integral['answer']}) + 3", integral) == 1.0
    (countdown,) = entries("countdown", 1)
    assert grade(f"(({countdown['answer']}))/1*1", countdown) < 1.0  # numbers that were not given
    assert grade(f"(({countdown['answer']}))", countdown) == 1.0


PAYLOADS = [
    "__import__('os').system('touch {file}')",
    "[__import__('os').system('touch {file}')]",
    "open('{file}', 'w')",
    "().__class__.__base__.__subclasses__()",
    "exec(\"open('{file}', 'w')\")",
    "(lambda: open('{file}', 'w'))()",
    "x.__class__",
    "sin.__init__.__globals__",
    "Symbol('x', commutative=open('{file}', 'w'))",
    "Integral(x, x)",
    "print(1)",
    "S('1')",
    "[c for c in '12']",
    "f'{{1+1}}'",
    "24 if 1 else 24",
    "10**10**10",
    "9**9**9**9",
    "2**(10**9)",
    "factorial(10**9)",
    "(" * 10_000,
    "-" * 10_000 + "1",
    "[" * 100_000,
    "9" * 1_000_000,
    "1+" * 100_000 + "1",
    "\u202e\u200b\ud800\x00",
]


@pytest.mark.parametrize("task", REPLACED)
def test_nothing_in_an_answer_is_executed(task: str, tmp_path: Path) -> None:
    (entry,) = entries(task, 1)
    for payload in PAYLOADS:
        filled = payload.replace("{file}", str(tmp_path / "touched"))
        assert grade(filled, entry) <= 0.05, filled
    assert list(tmp_path.iterdir()) == []


# Scores answers of many kinds for every task, and prints what Python compiled of them.
AUDIT = """
import signal, sys
from slipstream.rewards.function import ScoredText
from slipstream.rewards.reasoning import gym, reasoning_gym
task = None
def hook(event, arguments):
    if task and event == "compile" and b"PROBE" in (arguments[0].encode() if isinstance(arguments[0], str) else b""):
        print(task, arguments[0], flush=True)
def too_slow(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, too_slow)
sys.addaudithook(hook)
count = 0
for name in sorted(gym.factory.DATASETS):
    if name == "composite":
        continue
    entry = gym.create_dataset(name, size=1, seed=1)[0]
    right = str(entry["answer"])
    answers = ["PROBE", "[PROBE]", right + "+PROBE", right + " PROBE", "PROBE(1)", '{"a": "PROBE"}', "PROBE+" + right]
    for answer in answers:
        task = name
        signal.alarm(20)
        try:
            reasoning_gym(ScoredText("", answer, None, entry, "stop", 1))
        except Exception as error:
            print(name, "raised", repr(error)[:100], flush=True)
        signal.alarm(0)
        task = None
    count += 1
print("tasks", count)
"""


@pytest.mark.slow
def test_no_task_at_all_compiles_an_answer() -> None:
    """Python's own audit hook sees every use of eval, exec and compile, wherever in the package it is."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AUDIT],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert "PROBE" not in process.stdout and "raised" not in process.stdout, process.stdout
    assert process.stdout.endswith("tasks 105\n")


# ---------------------------------------------------------------------- answers and rows that cannot be read


def test_an_answer_that_a_task_cannot_read_is_wrong_and_no_fault() -> None:
    (entry,) = entries("prime_factorization", 1)
    scorer = gym.get_score_answer_fn("prime_factorization")
    with pytest.raises(ValueError):
        scorer("seven", entry)  # what the package does
    assert grade("seven", entry) == 0.0


def test_why_an_answer_could_not_be_read_is_logged_once_for_each_task(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasoning, "_reported", set())
    (entry,) = entries("prime_factorization", 1)
    for answer in ("seven", "eight", entry["answer"]):
        grade(answer, entry)
    (line,) = capsys.readouterr().err.splitlines()
    assert "WARNING reward: an answer that its task cannot read gets 0" in line
    assert "task=prime_factorization" in line
    assert "ValueError: invalid literal for int() with base 10: 'seven'" in line
    assert "prime_factorization.py, line" in line


def test_a_row_that_cannot_be_scored_is_a_fault_and_not_a_wrong_answer() -> None:
    (entry,) = entries("prime_factorization", 1)
    broken = entry | {"answer": "not a number", "metadata": {"source_dataset": "prime_factorization"}}
    with pytest.raises((ValueError, KeyError)):
        grade("2 x 2", broken)


# ---------------------------------------------------------------------- the readers


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("7/2", Fraction(7, 2)),
        ("1.5*2", 3),
        (".5", Fraction(1, 2)),
        ("2**3**2", 512),
        ("-2**2", -4),
        ("2**-1", Fraction(1, 2)),
        ("- - 3", 3),
        ("10 - 4 - 3", 3),
        ("8/4/2", 1),
        (" 1 ", 1),
    ],
)
def test_arithmetic(formula: str, value: Fraction | int) -> None:
    assert exact_number(formula) == value


@pytest.mark.parametrize(
    "formula",
    [
        *(
            "",
            " ",
            "+",
            "1+",
            "1 2",
            "2(3)",
            "(1",
            "1)",
            "()",
            "x",
            "abs(1)",
            "1,2",
            "1//2",
            "1^2",
            "2x",
            "1e5",
            "0x10",
        ),
        *("1j", "1_000", "\u0661", "--", "2**0.5", "2**101", "9**9**9", "(9**100)**100", "1" * 41),
        "(" * 61 + "1" + ")" * 61,
    ],
)
def test_what_is_no_arithmetic_is_refused(formula: str) -> None:
    with pytest.raises(ValueError):
        exact_number(formula)


def test_division_by_zero_is_python_s_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        exact_number("1/(2-2)")


SUMS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({parts[0]} {parts[1]}{parts[2]})")
        | inner.map(lambda text: f"-{text}")
    ),
    max_leaves=8,
)


@given(SUMS)
def test_arithmetic_is_python_s(formula: str) -> None:
    assert exact_number(formula) == eval(formula)  # written by the strategy above, nobody else


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (exact_number, read_symbolic, read_literal):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, ArithmeticError):
            read(text)


def test_symbolic_formulas_are_what_sympy_would_make_of_them() -> None:
    x = sympy.Symbol("x")
    assert read_symbolic("2*x**3/3 - sin(x)*exp(-x) + C") == 2 * x**3 / 3 - sympy.sin(x) * sympy.exp(-x) + sympy.Symbol(
        "C"
    )
    assert read_symbolic("t + pi*E", {"t": x}) == x + sympy.pi * sympy.E
    assert read_symbolic("1.5*sqrt(x)") == sympy.Float("1.5") * sympy.sqrt(x)
    assert read_symbolic("x**(1/2)") == sympy.sqrt(x)
    for refused in ("x**1000", "10**(10**10)", "2**pi", "Integral(x, x)", "x.diff", "(10**90)**90"):
        with pytest.raises(ValueError):
            read_symbolic(refused)
