"""What a response says after its thinking."""

import pytest

from slipstream.rewards.thinking import after_thinking


@pytest.mark.parametrize(
    ("response", "final"),
    [
        ("4", "4"),
        ("<think>hm</think>4", "4"),
        ("<thinking>hm</thinking>4", "4"),
        ("<think>a</think>b<think>c</think>4", "4"),
        ("hm</think>4", "4"),
        ("<think>hm", None),
        ("<think>a</think><think>b", None),
    ],
)
def test_what_follows_the_thinking(response: str, final: str | None) -> None:
    assert after_thinking(response) == final


def test_thinking_that_began_in_the_prompt() -> None:
    assert after_thinking("hm</think>4", "Go: <think>\n") == "4"
    assert after_thinking("4", "Go: <think>\n") is None
