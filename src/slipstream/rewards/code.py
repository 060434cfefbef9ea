"""The built-in reward for Python programs: what a response programs is run in the sandbox against the label's tests.

The program meets its tests in `program_tests.py`, which runs in the sandbox too. Here the program is found in the text
of the response and the label is read; nothing of either is evaluated in this process.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import RewardError
from slipstream.rewards.fences import fenced_blocks
from slipstream.rewards.function import Score, ScoredText
from slipstream.rewards.sandbox import SandboxLimits, SandboxResult, run_program
from slipstream.rewards.thinking import after_thinking_in_markdown

PYTHON_FENCES = {"python", "py"}

ANSWER_TAG = "answer"

MODULES = ("comparison.py", "label_code.py", "plain_data.py", "program_host.py", "program_tests.py")
"""Files of this package that run in the sandbox."""

START_TESTS = """
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from slipstream.rewards.program_tests import main
main()
"""

LONGEST_REPORT_LINE_BYTES = 4096
"""More than what `program_tests.py` reports of a test."""

METHOD = re.compile(r"Solution(?:\(\))?\.(\w+)")

EXPECTED = (
    "a list of {input, output}; {inputs, outputs}, with fn_name where a function is called; a list of assert "
    "statements; {test_list}; {test, entry_point}; or a text, the expected output"
)


@dataclass(frozen=True)
class ProgramTests:
    """The tests of a label, in the form that `program_tests.py` runs.

    `tests` are pairs of standard input and expected output (stdin), pairs of a list of arguments and the expected
    result (call), or pieces of test code (code), before which `setup` runs. `function` is the one that is called. With
    `check` the test code defines a function `check`, which is given that function; with `method` that
    is a method of the class `Solution`.
    """

    kind: Literal["stdin", "call", "code"]
    tests: list[Any]
    function: str | None = None
    setup: str = ""
    check: bool = field(default=False, kw_only=True)
    method: bool = field(default=False, kw_only=True)

    @property
    def usual_names(self) -> bool:
        """Whether the program has the names that LeetCode's programs have without importing them."""
        texts = (self.setup, *self.tests) if self.kind == "code" else ()
        return self.kind == "call" or self.method or any("Solution" in text for text in texts)


def code(
    text: ScoredText,
    *,
    partial_credit: bool = False,
    timeout_s: float = 4.0,
    total_timeout_s: float = 8.0,
    memory_bytes: int = 1 << 30,
    output_bytes: int = 1 << 22,
    allow_weaker_isolation: bool = False,
) -> Score:
    """Return 1.0 if the program of the response passes all tests of the label, else 0.0.

    The program is the last fenced Python block after the thinking; else the last block that names no language; else
    what stands in <answer> tags, or all of that text. With `partial_credit` the reward is the share of tests passed,
    which is the part `passed` in any case; without it the first failure ends the tests, and those not run count as not
    passed. A test may take `timeout_s`, all together `total_timeout_s`, which should be less than `reward.timeout_s`;
    `memory_bytes` is as in `SandboxLimits`, and `output_bytes` bounds what a test may write or return. Whatever the
    program does wrong is a test not passed. The label is read by `read_tests`.

    Raises ValueError for a label that is no test, or whose test code cannot be run, and RewardError where programs
    cannot be kept in (see `sandbox.run_program`).
    """
    if timeout_s <= 0 or total_timeout_s <= 0:
        raise ValueError(f"timeout_s and total_timeout_s must be above 0, found {timeout_s} and {total_timeout_s}")
    tests = read_tests(text.label)
    program = find_program(text)
    if program is None:
        return Score(0.0, {"passed": 0.0})
    job = {
        "kind": tests.kind,
        "tests": tests.tests,
        "function": tests.function,
        "setup": tests.setup,
        "check": tests.check,
        "usual_names": tests.usual_names,
        "program": program,
        "stop_at_failure": not partial_credit,
        "timeout_s": timeout_s,
        "total_timeout_s": total_timeout_s,
        "output_bytes": output_bytes,
    }
    report_bytes = LONGEST_REPORT_LINE_BYTES * (len(tests.tests) + 2)
    limits = SandboxLimits(timeout_s=total_timeout_s + 1.0, memory_bytes=memory_bytes, report_bytes=report_bytes)
    result = run_program(
        START_TESTS,
        stdin=json.dumps(job),
        modules=_modules(),
        limits=limits,
        allow_weaker_isolation=allow_weaker_isolation,
    )
    share = sum(_outcomes(result)) / len(tests.tests)
    return Score(share if partial_credit else float(share == 1.0), {"passed": share}, program)


def find_program(text: ScoredText) -> str | None:
    """Return the program of a response, by the order described at `code`; None if there is none."""
    found = after_thinking_in_markdown(text.response, text.prompt)
    if found is None:
        return None
    blocks = fenced_blocks(found, PYTHON_FENCES) or fenced_blocks(found, {""})
    program = blocks[-1] if blocks else _in_answer_tags(found)
    return program if program.strip() else None


def _in_answer_tags(text: str) -> str:
    """What stands in the last <answer> of a text, all of a text without one."""
    before, opening, answer = text.rpartition(f"<{ANSWER_TAG}>")
    return answer.partition(f"</{ANSWER_TAG}>")[0].strip("\n") if opening else before + answer


def read_tests(label: Any) -> ProgramTests:
    """Return the tests that a label holds. Raises ValueError, saying what was found, if it holds none.

    A text is JSON if it is that of an object, of a list of objects, or of a list of texts with assertions; every other
    text is the expected standard output of a program without input. What the forms are is in docs/code_rewards.md.
    """
    if isinstance(label, str):
        label = _from_json(label)
    if isinstance(label, str) and label.strip():
        return ProgramTests("stdin", [["", label]])
    if isinstance(label, int | float) and not isinstance(label, bool):
        return ProgramTests("stdin", [["", str(label)]])
    if isinstance(label, Mapping):
        return _read_mapping(label)
    if _is_list_of(label, Mapping):
        return _read_cases(label)
    if _is_list_of(label, str):
        return ProgramTests("code", [_assertion(entry) for entry in label])
    raise _no_tests(label)


def _from_json(label: str) -> Any:
    """The tests in a text, or the text itself where it is expected output."""
    if not label.lstrip().startswith(("{", "[")):
        return label
    try:
        value = json.loads(label)
    except (ValueError, RecursionError):
        return label
    has_assertions = _is_list_of(value, str) and all("assert" in entry for entry in value)
    return value if isinstance(value, dict) or _is_list_of(value, dict) or has_assertions else label


def _read_mapping(label: Mapping[str, Any]) -> ProgramTests:
    """The tests of an object, told apart by its keys."""
    if "inputs" in label and "outputs" in label:
        return _read_pairs(label)
    if "input" in label and "output" in label:
        return _read_cases([label])
    cases = _list(label.get("test_cases"))
    if _is_list_of(cases, Mapping):
        return _read_cases(cases, label.get("fn_name"))
    statements = _list(label.get("test_list"))
    if _is_list_of(statements, str):
        setup = [*(label.get("test_imports") or []), label.get("test_setup_code") or ""]
        tests = [_assertion(entry) for entry in statements]
        return ProgramTests("code", tests, setup="\n".join(str(line) for line in setup))
    if isinstance(label.get("test"), str):
        function = label.get("entry_point")
        if function is None:
            return ProgramTests("code", [_assertion(label["test"])])
        return ProgramTests("code", [label["test"]], _name(function), check=True, method=_is_method(function))
    raise _no_tests(label)


def _read_pairs(label: Mapping[str, Any]) -> ProgramTests:
    """The tests of an object with inputs and outputs, lists or the JSON of lists."""
    inputs, outputs = _list(label["inputs"]), _list(label["outputs"])
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError("inputs and outputs must be lists of the same length, with at least one entry")
    pairs = [list(pair) for pair in zip(inputs, outputs, strict=True)]
    function = label.get("fn_name")
    if function is None:
        return ProgramTests("stdin", [[_lines(given), _lines(expected)] for given, expected in pairs])
    return ProgramTests("call", [_call(*pair) for pair in pairs], _name(function))


def _list(value: Any) -> Any:
    """The list in a JSON text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, list) else value


def _read_cases(cases: list[Mapping[str, Any]], function: Any = None) -> ProgramTests:
    """The tests of a list of objects, each with input and output; calls where the name of a function is given."""
    calls = []
    for case in cases:
        if "input" not in case or "output" not in case:
            raise _no_tests(cases)
        kind = case.get("testtype", case.get("type", "stdin"))
        named = case.get("fn_name", function)
        if kind in ("functional", "function_call") and named is not None:
            calls.append((named, _call(case["input"], case["output"])))
        elif kind not in ("stdin", "stdin_stdout"):
            raise ValueError(
                f"a test of type {kind!r} needs the name of the function: write it as {{fn_name, inputs, outputs}}"
            )
    if not calls:
        return ProgramTests("stdin", [[_lines(case["input"]), _lines(case["output"])] for case in cases])
    if len(calls) < len(cases) or len({named for named, _ in calls}) > 1:
        raise ValueError("the tests of a label must all call the same function, or all read standard input")
    return ProgramTests("call", [call for _, call in calls], _name(calls[0][0]))


def _call(given: Any, expected: Any) -> list[Any]:
    """Arguments and result of a call: a list of arguments, or a text with one JSON value a line, result likewise."""
    if isinstance(given, list):
        return [given, expected]
    if isinstance(given, str) and isinstance(expected, str):
        try:
            return [[json.loads(line) for line in given.splitlines() if line.strip()], json.loads(expected)]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the inputs of a call in a text must be JSON, one a line: {error}") from error
    raise ValueError(f"the inputs of a call must be a list of arguments, found {_shown(given)}")


def _lines(value: Any) -> str:
    """Standard input or output of a test: a text, or a list of lines."""
    if isinstance(value, list):
        return "\n".join(_lines(line) for line in value)
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"input and output of a test must be text, found {_shown(value)}")


def _assertion(test: str) -> str:
    if "assert" not in test.lower():
        raise ValueError(f"a test in a list of texts must be an assert statement, found {_shown(test)}")
    return test


def _name(function: Any) -> str:
    """The name of the function under test; that of a method where it is written as `Solution().method`."""
    method = METHOD.fullmatch(function) if isinstance(function, str) else None
    name = method[1] if method else function
    if isinstance(name, str) and name.isidentifier():
        return name
    raise ValueError(f"the name of the function under test must be an identifier, found {_shown(function)}")


def _is_method(function: Any) -> bool:
    return METHOD.fullmatch(function) is not None


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, kind) for entry in value)


def _no_tests(label: Any) -> ValueError:
    keys = f" with the keys {', '.join(map(str, label))}" if isinstance(label, Mapping) else ""
    return ValueError(f"the label holds no tests: expected {EXPECTED}; found {_shown(label)}{keys}")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:80] + '...'}"


@cache
def _modules() -> dict[str, str]:
    folder = Path(__file__).parent
    return {f"slipstream/rewards/{name}": (folder / name).read_text(encoding="utf-8") for name in MODULES}


def _outcomes(result: SandboxResult) -> list[bool]:
    """Which tests were passed. Tests that were not reached because a limit was passed are missing.

    Raises ValueError if the tests cannot be run, RewardError if what runs them did not start. What happens after that
    is the program's doing, and so are tests that are missing. A line without an end was cut.
    """
    messages = [json.loads(line) for line in result.report.splitlines(keepends=True) if line.endswith("\n")]
    if not messages:
        raise RewardError(f"the tests were not started ({result.ending}): {result.errors[-500:].strip()}")
    for message in messages:
        if "label" in message:
            raise ValueError(f"the tests of the label cannot be run: {message['label']}")
    if result.exit_code is not None and result.exit_code < 0:
        return []  # killed by a signal, which only the program can have sent
    return [bool(message["passed"]) for message in messages if "passed" in message]
