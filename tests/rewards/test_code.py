"""The code reward: where the program is, what labels mean, what passes, and what only pretends to."""

import json
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RewardError
from slipstream.rewards import sandbox
from slipstream.rewards.code import code, read_tests
from slipstream.rewards.function import Score, ScoredText, check_reward_value, resolve_reward
from slipstream.rewards.plain_data import decode, encode
from slipstream.rewards.sandbox import Isolation, detect_isolation

needs_namespaces = pytest.mark.skipif(not detect_isolation().namespaces, reason="needs user namespaces")


def text(response: str, label: Any = None, prompt: str = "") -> ScoredText:
    return ScoredText(prompt, response, label, {}, "stop", 1)


def grade(program: str, label: Any, **options: Any) -> Score:
    return code(text(f"```python\n{textwrap.dedent(program)}\n```", label), **options)


def test_no_program_earns_nothing_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.rewards.code.run_program", None)
    assert code(text("<think>no idea", "1")) == Score(0.0, {"passed": 0.0})


# ---------------------------------------------------------------------- what a label means


@pytest.mark.parametrize(
    ("label", "kind", "tests"),
    [
        ([{"input": "1\n", "output": "2\n"}], "stdin", [["1\n", "2\n"]]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], "stdin", [["1", "2"]]),
        ({"input": "1", "output": "2"}, "stdin", [["1", "2"]]),
        ({"inputs": ["1", ["2", "3"]], "outputs": ["4", ["5"]]}, "stdin", [["1", "4"], ["2\n3", "5"]]),
        ({"language": "python", "test_cases": [{"input": "1", "output": "2"}]}, "stdin", [["1", "2"]]),
        ({"fn_name": "f", "inputs": [[1, [2]]], "outputs": [3]}, "call", [[[1, [2]], 3]]),
        ({"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["4"]}, "call", [[[[1, 2], 3], 4]]),
        (["assert f(1) == 2"], "code", ["assert f(1) == 2"]),
        ({"test_list": ["assert f(1) == 2"], "test_setup_code": ""}, "code", ["assert f(1) == 2"]),
        ({"test": "def check(f): assert f(1)", "entry_point": "f"}, "code", ["def check(f): assert f(1)"]),
        ({"test": "assert f(1)"}, "code", ["assert f(1)"]),
        ({"inputs": '["1"]', "outputs": '["4"]'}, "stdin", [["1", "4"]]),  # TACO
        ({"test_list": '["assert f(1) == 2"]'}, "code", ["assert f(1) == 2"]),
        ({"test": "def check(f): assert f(1)", "entry_point": "Solution().f"}, "code", ["def check(f): assert f(1)"]),
        ([{"type": "function_call", "fn_name": "f", "input": [1], "output": 3}], "call", [[[1], 3]]),
        (7, "stdin", [["", "7"]]),
        (7.5, "stdin", [["", "7.5"]]),
        ("7\n", "stdin", [["", "7\n"]]),
        ("[1, 2]", "stdin", [["", "[1, 2]"]]),
        ('["a", "b"]', "stdin", [["", '["a", "b"]']]),
        ("[not json", "stdin", [["", "[not json"]]),
        ("[" * 100_000, "stdin", [["", "[" * 100_000]]),
    ],
)
def test_the_forms_of_labels(label: Any, kind: str, tests: list[Any]) -> None:
    read = read_tests(label)
    assert (read.kind, read.tests) == (kind, tests)
    if not isinstance(label, str | int | float):
        assert read_tests(json.dumps(label)) == read


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "the label holds no tests: .*found NoneType"),
        ("", "the label holds no tests"),
        (True, "found bool True"),
        ([], "found list"),
        ([1, 2], "found list"),
        ({}, "found dict"),
        ({"question": 1}, "with the keys question"),
        ('{"question": 1}', "with the keys question"),
        ([{"input": "1"}], "the label holds no tests"),
        ({"inputs": ["1"], "outputs": []}, "lists of the same length"),
        ({"inputs": [], "outputs": []}, "at least one"),
        (["print(1)"], "must be an assert statement"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "must be a list of arguments"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "must be JSON"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "os.system('x')"}, "must be an identifier"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "needs the name of the function"),
        ([{"input": {}, "output": "1"}], "must be text"),
    ],
)
def test_a_label_without_tests_is_refused(label: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code(text("print(1)", label))


@needs_namespaces
@pytest.mark.parametrize(
    ("label", "message"),
    [
        (["assert f(1) ="], "is not Python"),
        ({"test": "assert f(1)", "entry_point": "f"}, "defines no function check"),
        (["assert f(lambda x: x)"], "passes a function"),
        (["def g(x): return 1\nassert g(1) == 1"], "use nothing of the program"),
    ],
)
def test_tests_that_cannot_be_run_are_the_fault_of_the_label(label: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grade("def f(x): return 1", label)


# ---------------------------------------------------------------------- values that travel


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.fractions(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.frozensets(st.integers())
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    written = json.loads(json.dumps(encode(value, lambda other: pytest.fail(f"not plain: {other!r}"))))
    arrived = decode(written, lambda number: pytest.fail("no object was sent"))
    assert arrived == value and type(arrived) is type(value)


# ---------------------------------------------------------------------- right and wrong programs

DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "10"}]
ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
HUMAN_EVAL = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}
ADD_RIGHT = "def add(a, b):\n    return a + b"
UNITTEST = """import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
if __name__ == "__main__":
    unittest.main()
"""
LEETCODE = """class Solution:
    def twoSum(self, a: int, b: Optional[int]) -> List[int]:
        return sorted(deque([b, a]), key=lambda n: math.floor(n) + pow(2, 0, 3))
"""


@needs_namespaces
@pytest.mark.parametrize(
    ("program", "label", "reward"),
    [
        ("print(2 * int(input()))", DOUBLE, 1.0),
        ("if __name__ == '__main__':\n    print(2 * int(input()))", DOUBLE, 1.0),
        ("import sys\nprint(2 * int(sys.stdin.read()))\nexit()", DOUBLE, 1.0),
        ("print(4)", DOUBLE, 0.0),
        ("print(2 * int(input()))\nraise ValueError", DOUBLE, 0.0),
        ("print('hello')", "hello", 1.0),
        ("", "hello", 0.0),
        (ADD_RIGHT, ADD, 1.0),
        ("def add(a, b):\n    return a - b", ADD, 0.0),
        ("def plus(a, b):\n    return a + b", ADD, 0.0),
        ("def add(a, b:\n    return a + b", ADD, 0.0),
        (ADD_RIGHT + "\nif __name__ == '__main__':\n    input('never asked')", ADD, 1.0),
        ("print('said while loading')\n" + ADD_RIGHT, ADD, 1.0),
        (ADD_RIGHT, HUMAN_EVAL, 1.0),
        ("def add(a, b):\n    return 4", HUMAN_EVAL, 0.0),
        ("def sum(a, b):\n    return 6", ["assert sum(10, 15) == 6"], 1.0),  # MBPP 126
        ("def sum(a):\n    return 6", ["assert sum([10, 15]) == 25"], 0.0),
        ("x = 1", ["assert sum([10, 15]) == 25"], 0.0),  # it is the program that is to define it
        ("result = 100\ndef abs(x): return 0", ["assert abs(result - 5) < 1e-6"], 0.0),
        ("result = [2, 1]", ["assert sorted(result) == [1, 2]"], 1.0),
        ("result = [1]\ndef len(x): return 2", ["assert len(result) == 2"], 0.0),
        (ADD_RIGHT, {"test": "from solution import add\ndef test_add():\n    assert add(1, 2) == 3"}, 1.0),  # KodCode
        (ADD_RIGHT, {"test": "from solution import *\nimport solution\nassert add(1, 2) == solution.add(2, 1)"}, 1.0),
        ("def add(a, b): return 0", {"test": "from solution import add as plus\nassert plus(1, 2) == 3"}, 0.0),
        ("def other(): pass", {"test": "from solution import add\nassert add(1, 2) == 3"}, 0.0),
        (ADD_RIGHT, {"test": "def test_add():\n    assert add(1, 2) == 3"}, 1.0),
        ("def add(a, b): return 0", {"test": "def test_add():\n    assert add(1, 2) == 3"}, 0.0),
        ("def add(a, b): return 0", ["def test_add(): assert add(1, 2) == 3"], 0.0),
        (ADD_RIGHT, {"test": UNITTEST}, 1.0),
        ("def add(a, b): return 0", {"test": UNITTEST}, 0.0),
        (ADD_RIGHT, {"test": "class TestAdd:\n    def test_it(self): assert add(1, 2) == 3"}, 1.0),
        ("def add(a, b): return 0", {"test": "class TestAdd:\n    def test_it(self): assert add(1, 2) == 3"}, 0.0),
        ("def f(n): return []", ["for value in f(3):\n    assert value > 0"], 0.0),  # no check was reached
        ("def f(n): return [n]", ["for value in f(3):\n    assert value > 0"], 1.0),
        ("def f(n): raise KeyError", ["try:\n    f(1)\n    assert False\nexcept KeyError: pass"], 1.0),
        ("def f(n): return 1", ["try:\n    f(1)\n    assert False\nexcept KeyError: pass"], 0.0),
        ("def f(n): return 1", ["if f(1) != 2:\n    raise AssertionError"], 0.0),
        (LEETCODE, {"fn_name": "twoSum", "inputs": [[1, 2]]}, 1.0),
        (LEETCODE, {"test": "def check(f):\n    assert f(1, 2) == [1, 2]", "entry_point": "Solution().twoSum"}, 1.0),
        ("", {"fn_name": "gcd", "inputs": [[4, 6]]}, 0.0),  # a usual name is not the program's
        ("class Solution:\n    def twoSum(self, a, b): return [a, b]", {"fn_name": "twoSum", "inputs": [[1, 2]]}, 1.0),
        ("def twoSum(a, b): return a, b", {"fn_name": "twoSum", "inputs": [[1, 2]]}, 1.0),
        ("def twoSum(a, b): return b, a", {"fn_name": "twoSum", "inputs": [[1, 2]]}, 0.0),
    ],
)
def test_programs_that_are_right_and_programs_that_are_not(program: str, label: Any, reward: float) -> None:
    if isinstance(label, dict) and "inputs" in label:
        label = label | {"outputs": [[1, 2]]}
    assert grade(program, label).reward == reward


@needs_namespaces
def test_tests_see_ordinary_values_and_may_use_the_types_of_the_program() -> None:
    program = """
    import collections, dataclasses, datetime, fractions, math
    from dataclasses import dataclass

    @dataclass
    class Node:
        value: "int"
        next: object = None

    def total(node):
        return 0 if node is None else node.value + total(node.next)

    def numbers(n): return (i for i in range(n))
    def counts(text): return collections.Counter(text)
    def half(n): return fractions.Fraction(n, 2)
    def big(n): return 7 ** n
    def pair(): return 1, {2}, b"3", None
    def fail(): raise KeyError("no")
    def when(): return datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.timezone.utc)
    def line(): return collections.deque([1, 2]), range(3), datetime.timedelta(days=1)
    def poly(xs, x): return sum(c * math.pow(x, i) for i, c in enumerate(xs))
    """
    label = {
        "test_imports": ["from fractions import Fraction"],
        "test_setup_code": "root = Node(1)\nroot.next = Node(2, Node(3))",
        "test_list": [
            "assert total(root) == 6 and root.next.value == 2",
            "assert list(numbers(3)) == [0, 1, 2] and sorted(numbers(2)) == [0, 1]",
            "assert counts('aab') == {'a': 2, 'b': 1}",
            "assert half(3) == 1.5 == Fraction(3, 2) and isinstance(half(3), Fraction)",
            "assert big(5000) == 7 ** 5000",
            "assert pair() == (1, {2}, b'3', None) and type(pair()) is tuple",
            "try:\n    fail()\n    assert False\nexcept KeyError:\n    pass",
            "import datetime as d\nassert when()[0] == d.date(2024, 2, 29)",
            "assert when()[1] == datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.timezone.utc)",
            "assert line() == (collections.deque([1, 2]), range(3), d.timedelta(days=1))",
            "g = numbers(3)\nassert (next(g), next(g), next(g), next(g, 'end')) == (0, 1, 2, 'end')",
            "assert math.fabs(poly([-1, 1], 1)) < 1e-9",
        ],
    }
    score = grade(program, label, partial_credit=True)
    assert score.reward == 1.0


@needs_namespaces
def test_partial_credit_is_the_share_of_tests_passed() -> None:
    program = "n = int(input())\nassert n != 2, n\nwhile n == 3: pass\nprint(n)"
    label = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]}
    score = grade(program, label, partial_credit=True, timeout_s=1.0)
    assert (score.reward, score.parts) == (0.5, {"passed": 0.5})
    score = grade(program, label)
    assert (score.reward, score.parts) == (0.0, {"passed": 0.25})  # it ends at the first failure
    assert score.answer == program + "\n"


@needs_namespaces
def test_a_function_that_hangs_fails_its_test_and_the_next_one_has_a_new_process() -> None:
    program = "def f(x):\n    while x == 1: pass\n    if x == 2: import os; os._exit(0)\n    return x"
    label = {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [1, 2, 3]}
    assert grade(program, label, partial_credit=True, timeout_s=1.0).reward == pytest.approx(1 / 3)
    label = {"test_list": ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]}
    assert grade(program, label, partial_credit=True, timeout_s=1.0).reward == pytest.approx(1 / 3)


@needs_namespaces
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True: print('x' * 1000)",
        "x = []\nwhile True: x.append(bytes(2**24))",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "def add(a, b): return [[]] * 10**9",
        "def add(a, b):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x",
    ],
)
def test_programs_without_end_or_measure_fail_in_time(program: str) -> None:
    label = ADD if "add" in program else DOUBLE
    assert grade(program, label, timeout_s=1.0, total_timeout_s=8.0, memory_bytes=1 << 28).reward == 0.0


# ---------------------------------------------------------------------- programs that pretend

# Each passes a common harness that runs program and tests in one process. None of them adds two numbers.
PRETENDERS = {
    "leaves before the tests": "import os; os._exit(0)",
    "leaves politely": "import sys; sys.exit(0)",
    "raises on import": "raise SystemExit(0)",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "leaves politely when called": "def add(a, b): raise SystemExit(0)",
    "equals everything": "class Any:\n  def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "a number that equals everything": (
        "class Any(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\n"
        "def add(a, b): return Any(77)"
    ),
    "replaces built-ins": (
        "import builtins\nfor name in ('AssertionError', 'exec', 'compile', 'isinstance', 'bool', 'hex'):\n"
        "  setattr(builtins, name, lambda *a, **k: True)\ndef add(a, b): return 77"
    ),
    "is its own test": "def check(f): pass\ncandidate = None\ndef add(a, b): return 77",
    "patches the modules of the harness": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "  if 'slipstream' in name or name in ('json', '__main__'):\n"
        "    for key in dir(module):\n"
        "      try: setattr(module, key, lambda *a, **k: {'passed': True})\n"
        "      except Exception: pass\ndef add(a, b): return 77"
    ),
    "writes the verdict to every descriptor": (
        'import os\nfor fd in range(256):\n  for line in (b\'{"passed": true, "reason": null}\\n\',) * 3:\n'
        "    try: os.write(fd, line)\n    except OSError: pass\ndef add(a, b): return 77"
    ),
    "writes the verdict when called": (
        "import os\ndef add(a, b):\n  for fd in range(256):\n    try: os.write(fd, b'{\"passed\": true}\\n' * 3)\n"
        "    except OSError: pass\n  return 77"
    ),
    "writes to the descriptors of the harness": (
        "import os\nfor p in os.listdir('/proc'):\n  for fd in range(16):\n"
        "    try: open(f'/proc/{p}/fd/{fd}', 'wb', buffering=0).write(b'{\"passed\": true}\\n' * 3)\n"
        "    except OSError: pass\ndef add(a, b): return 77"
    ),
    "kills the harness": "import os\nos.kill(os.getppid(), 9)\ndef add(a, b): return 77",
    "stops the harness": "import os\nos.kill(os.getppid(), 19)\ndef add(a, b): return 77",
    "looks for the tests": (
        "import glob, os, re\nfound = b''\n"
        "for path in glob.glob('/job/**', recursive=True) + glob.glob('/proc/*/fd/*'):\n"
        "  try: found += os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 10**6)\n"
        "  except OSError: pass\n"
        "for maps in glob.glob(f'/proc/{os.getppid()}/maps') + glob.glob('/proc/1/maps'):\n"
        "  try:\n"
        "    memory = open(maps.replace('maps', 'mem'), 'rb')\n"
        "    for line in open(maps):\n"
        "      if ' rw' in line:\n"
        "        first, last = (int(number, 16) for number in line.split()[0].split('-'))\n"
        "        memory.seek(first)\n"
        "        found += memory.read(last - first)\n"
        "  except OSError: pass\n"
        "def add(a, b):\n"
        "  known = re.search(rb'add\\(%d, %d\\) == (\\d+)' % (a, b), found)\n  return int(known[1]) if known else 77"
    ),
    "takes the harness its processes": (
        "import os, resource\ntry: resource.prlimit(os.getppid(), resource.RLIMIT_NPROC, (0, 0))\n"
        "except OSError: pass\ndef add(a, b): return 77"
    ),
    "takes all processes": (
        "import os, time\nwhile True:\n  try: pid = os.fork()\n  except OSError: break\n"
        "  if not pid:\n    os.setsid()\n    time.sleep(60)\nprint(4)\ndef add(a, b): return 77"
    ),
    "an exception that ends loops": "def add(a, b): raise StopIteration",
    "interrupts": "def add(a, b): raise KeyboardInterrupt",
    "an answer that was not asked for": (
        "import json, os, sys\nos.write(int(sys.orig_argv[-1]), json.dumps({'value': True}).encode() + b'\\n')\n"
        "def add(a, b): return 77"
    ),
}


LOOP = {
    "test": "def check(f):\n    for value in map(f, [1, 2], [2, 2]):\n        assert value == 3\n",
    "entry_point": "add",
}


@needs_namespaces
@pytest.mark.parametrize("name", PRETENDERS)
def test_a_program_cannot_pretend_to_pass(name: str) -> None:
    score = grade(PRETENDERS[name], LOOP if "loops" in name else ADD, timeout_s=1.0, total_timeout_s=8.0)
    assert score.reward == 0.0 and score.parts == {"passed": 0.0}


@needs_namespaces
@pytest.mark.parametrize("name", PRETENDERS)
def test_nor_where_only_its_values_are_looked_at(name: str) -> None:
    label = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    assert grade(PRETENDERS[name], label, timeout_s=1.0, total_timeout_s=8.0).reward == 0.0


@needs_namespaces
def test_what_tests_call_around_the_function_is_not_taken_from_the_program() -> None:
    program = "def set(x): return 1\ndef sorted(x): return 1\nclass math: isclose = print\ndef similar(a): return [77]"
    tests = ["assert set(similar(1)) == set([2])", "assert sorted(similar(1)) == sorted([2])"]
    tests.append("assert math.isclose(similar(1)[0], 2)")
    assert grade(program, tests, partial_credit=True).reward == 0.0


@needs_namespaces
def test_an_object_equals_nothing_and_decides_nothing() -> None:
    program = """
    class Any:
        def __eq__(self, other): return True
        def __lt__(self, other): return True
        __gt__ = __sub__ = __rsub__ = __abs__ = __lt__
    thing = Any()
    def f(x): return thing
    """
    tests = ["assert f(1) == f(2)", "assert f(1) in [5]", "assert f(1) < 5", "assert abs(f(1) - 2) < 3"]
    assert grade(program, tests, partial_credit=True).reward == 0.0


@needs_namespaces
@pytest.mark.parametrize("name", ["takes the harness its processes", "takes all processes", "kills the harness"])
def test_a_program_that_stops_the_tests_from_going_on_has_failed_them(name: str) -> None:
    label = [{"input": "2", "output": "4"}, {"input": "3", "output": "6"}]
    assert grade(PRETENDERS[name], label, timeout_s=1.0, total_timeout_s=8.0).reward == 0.0


@needs_namespaces
def test_a_report_may_be_longer_than_an_output() -> None:
    cases = [{"input": str(number), "output": "no"} for number in range(5)]
    score = grade("print(input())", [*cases, {"input": "1", "output": "1"}], output_bytes=100, partial_credit=True)
    assert score.reward == pytest.approx(1 / 6)


# ---------------------------------------------------------------------- in its place


def test_it_has_a_name_and_its_score_is_a_reward() -> None:
    assert resolve_reward("code") is code
    assert check_reward_value(Score(1.0, {"passed": 1.0}, "x")).reward == 1.0


def test_it_refuses_to_run_programs_in_weaker_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    weaker = Isolation(namespaces=False, call_filter=True, problem="not permitted")
    monkeypatch.setattr(sandbox, "detect_isolation", lambda: weaker)
    with pytest.raises(RewardError, match="allow_weaker_isolation"):
        grade("print(1)", "1")


@needs_namespaces
def test_it_runs_in_the_reward_pool_and_no_program_costs_a_call(with_pool: Any, trajectory: Any) -> None:
    responses = [ADD_RIGHT, "while True: pass", "import os; os.kill(os.getppid(), 9)", "<think>", ADD_RIGHT]

    async def use(pool: Any) -> Any:
        return await pool.score([trajectory(response, label=ADD) for response in responses])

    options = {"timeout_s": 3.0, "total_timeout_s": 10.0}
    results = with_pool("", use, function="code", options=options, workers=2)
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [result.failure for result in results] == [None] * 5
