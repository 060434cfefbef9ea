"""Steps are found in the tokens themselves, at the token with which the separator is complete."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.step_ends import StepEnds
from slipstream.errors import ConfigError

PROMPT = 3


class Spelling:
    """A tokenizer whose tokens are given texts; the text of a separator is one token. `<eos>` is a control token."""

    name_or_path = "spelled"
    all_special_ids = (0,)

    def __init__(self, *pieces: str) -> None:
        self.added_tokens_decoder: dict[int, Any] = {}
        self.pieces = ["<eos>", *pieces]

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        if text not in self.pieces:
            self.pieces.append(text)
        return {"input_ids": [self.pieces.index(text)]}

    def decode(self, tokens: list[int], clean_up_tokenization_spaces: bool) -> str:
        return "".join(self.pieces[token] for token in tokens)


def ends(*pieces: str, separator: str = "\n\n") -> list[int]:
    """Places of the ends of steps, counted from the first token of an answer made of tokens that spell `pieces`."""
    tokenizer: Any = Spelling(*dict.fromkeys(pieces))
    tokens = np.array([0] * PROMPT + [tokenizer.pieces.index(piece) for piece in pieces])
    is_answer = np.arange(len(tokens)) >= PROMPT
    return [int(end) - PROMPT for end in StepEnds(tokenizer, separator).find(tokens, is_answer)]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (("a", "\n\n", "b", "<eos>"), [1, 3]),
        (("a", "\n\n", "b"), [1, 2]),
        (("a", ".\n\n", "b"), [1, 2]),
        (("a", "\n", "\n", "b"), [2, 3]),
        (("a", "\n\nb", "c", "<eos>"), [1, 3]),
        (("a", "\n\n", "<eos>"), [1]),
        (("\n\n", "a", "\n\n", "\n\n", " ", "b"), [2, 5]),
        (("a", "\n\n\n", "b"), [1, 2]),
        (("a\n\nb\n\n", "c"), [0, 1]),
        (("a\n\nb",), [0]),
        (("a", "\n", "b"), [2]),
        (("<eos>",), []),
        ((" ", "\n\n", "<eos>"), []),
        ((), []),
    ],
)
def test_where_steps_end(pieces: tuple[str, ...], expected: list[int]) -> None:
    assert ends(*pieces) == expected


def test_a_control_token_can_be_the_separator() -> None:
    assert ends("a", "<eos>", "b", separator="<eos>") == [1, 2]


def test_what_the_policy_did_not_write_divides_answers_and_holds_no_steps() -> None:
    tokenizer: Any = Spelling("a", "\n\n", "b")
    tokens, is_answer = np.array([1, 2, 1, 3, 2, 3, 1]), np.array([0, 0, 1, 1, 0, 0, 1], dtype=bool)
    assert StepEnds(tokenizer, "\n\n").find(tokens, is_answer).tolist() == [3, 6]


@given(steps=st.lists(st.text(st.sampled_from("ab1 +é€"), min_size=1).filter(str.strip), min_size=1, max_size=6))
def test_every_step_of_a_real_tokenizer_is_found_and_spelled_by_its_tokens(
    tiny_tokenizer: Any, steps: list[str]
) -> None:
    tokens = np.array(tiny_tokenizer("\n\n".join(steps), add_special_tokens=False)["input_ids"])
    found = StepEnds(tiny_tokenizer, "\n\n").find(tokens, np.ones(len(tokens), dtype=bool))
    pieces = np.split(tokens, found[:-1] + 1)
    assert [tiny_tokenizer.decode(piece).removesuffix("\n\n") for piece in pieces] == steps


def test_a_separator_that_the_tokens_do_not_keep_is_refused() -> None:
    class Losing(Spelling):
        def decode(self, tokens: list[int], clean_up_tokenization_spaces: bool) -> str:
            return super().decode(tokens, clean_up_tokenization_spaces).strip()

    tokenizer: Any = Losing()
    with pytest.raises(ConfigError, match=r"^step_separator: the tokenizer of 'spelled' does not keep '\\n\\n'"):
        StepEnds(tokenizer, "\n\n")
