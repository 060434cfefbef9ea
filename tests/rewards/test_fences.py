"""Where the program of a response is, in the many ways that models write it."""

import pytest

from slipstream.rewards.code import find_program
from slipstream.rewards.fences import fenced_blocks
from slipstream.rewards.function import ScoredText


def text(response: str, prompt: str = "") -> ScoredText:
    return ScoredText(prompt, response, None, {}, "stop", 1)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```py\nprint(1)\n```\nor better\n```Python3\nprint(2)\n```", "print(2)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),  # an untagged block is no program then
        ("```python\nprint(1)\n```\nRun it:\n```bash\npython x.py\n```", "print(1)\n"),
        ("```python\nprint(1)", "print(1)"),  # the fence was forgotten, or the response cut
        ("~~~python\nprint('```')\n~~~", "print('```')\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("1. So:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)\n"),
        ("```python title=a.py\nprint(1)\n```", "print(1)\n"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
        ("<think>```python\nprint(1)\n```</think>\n```python\nprint(2)\n```", "print(2)\n"),
        ("<think>```python\nprint(1)\n```</think>", None),
        ("<think>```python\nprint(1)\n```", None),  # thinking that does not end has no answer
        ("<answer>```python\nprint(1)\n```</answer>", "print(1)\n"),
        ("Here it is: ```python\nprint(1)\n```", "print(1)\n"),
        ("Wrap it in ```python fences, ~~~5 lines.\n```python\nprint(1)\n```", "print(1)\n"),
        ("Well.\n<answer>\nprint(1)\n</answer>", "print(1)"),
        ("```python:main.py\nprint(1)\n```", "print(1)\n"),
        ("```{.python}\nprint(1)\n```", "print(1)\n"),
        ("```python,linenos\nprint(1)\n```", "print(1)\n"),
        ("```python3.11\nprint(1)\n```", "print(1)\n"),
        ("> ```python\n> if 1:\n>     print(1)\n> ```\nSo.", "if 1:\n    print(1)\n"),
        ('```python\n"""\n```\nx\n```\n"""\nprint(1)\n```\nDone.', '"""\n```\nx\n```\n"""\nprint(1)\n'),
        ('```python\nprint(1)  # """\n```\nIt prints\n```\n1\n```', 'print(1)  # """\n'),
        (
            "```python\nimport re\nre.sub('<think>.*?</think>', '', x)\n```",
            "import re\nre.sub('<think>.*?</think>', '', x)\n",
        ),
        ("<think>hm</think>I drop `<think>`:\n```python\nx  # <think>\n```", "x  # <think>\n"),
        ("<think>so</think>\n```python\nx = '</think>'\n```", "x = '</think>'\n"),
        ("<think>```python\nbad\n</think>\n```python\ngood\n```", "good\n"),
        ("```python\n\n```", None),
        ("", None),
    ],
)
def test_the_program_of_a_response(response: str, program: str | None) -> None:
    assert find_program(text(response)) == program


def test_thinking_that_began_in_the_prompt_must_end() -> None:
    assert find_program(text("```python\nprint(1)\n```", prompt="Go.<think>\n")) is None
    assert find_program(text("hm</think>print(2)", prompt="Go.<think>\n")) == "print(2)"


@pytest.mark.parametrize(
    "response",
    [
        "```python\n\"\"\"'''\n```\n" * 30_000,
        "> " * 200_000,
        "a ```" * 100_000,
        "```" * 200_000,
        " " * 400_000,
        "```" + " a" * 200_000 + "`",
        "```python\n" * 50_000,
    ],
)
def test_finding_it_takes_linear_time(response: str) -> None:
    assert isinstance(fenced_blocks(response, {"python"}), list)
