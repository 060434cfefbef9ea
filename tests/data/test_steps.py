"""Labelled steps: each read at its last token in what a rollout would see; what is no label is refused or ignored."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.data import DataConfig
from slipstream.data.steps import LabelledSteps, build_labelled_steps, step_example
from slipstream.errors import DataError, SlipstreamError

Build = Callable[..., tuple[list[LabelledSteps], Any]]
STEPS = ["1 + 2 = 3", "3 + 3 = 7"]


def row(steps: Any = STEPS, labels: Any = (True, False), prompt: str = "What is 1 + 2 + 3?") -> dict[str, Any]:
    return {"prompt": prompt, "completions": steps, "labels": list(labels) if isinstance(labels, tuple) else labels}


@pytest.fixture
def build(tmp_path: Path, write_rows: Callable[..., Path], tiny_tokenizer: Any) -> Build:
    """build(*rows, **keys of the data section): what is made of them."""

    def make(
        *rows: dict[str, Any], max_tokens: int = 64, separator: str = "\n\n", exclude: Any = (), **keys: Any
    ) -> Any:
        config = DataConfig(source=str(write_rows(tmp_path / "rows.jsonl", list(rows))), **keys)
        return build_labelled_steps(config, tiny_tokenizer, max_tokens, separator=separator, exclude=exclude)

    return make


def test_steps_end_where_the_separator_or_the_answer_ends(build: Build, tiny_tokenizer: Any) -> None:
    [answer], report = build(row())
    begin, middle, end = np.split(answer.tokens, answer.ends + 1)
    assert tiny_tokenizer.decode(begin) == "<|user|>What is 1 + 2 + 3?<|assistant|>1 + 2 = 3\n\n"
    assert tiny_tokenizer.decode(middle) == "3 + 3 = 7<|end|>" and end.size == 0
    assert answer.labels.tolist() == [1.0, 0.0] and report.kept == 1


def test_the_tokens_are_those_of_a_rollout(build: Build, tiny_tokenizer: Any) -> None:
    """Prompt as an engine is given it, answer as a policy would write it: one tokenization, no second BOS."""
    [answer], _ = build(row())
    prompt = tiny_tokenizer("<|user|>What is 1 + 2 + 3?<|assistant|>", add_special_tokens=False)["input_ids"]
    response = tiny_tokenizer("1 + 2 = 3\n\n3 + 3 = 7<|end|>", add_special_tokens=False)["input_ids"]
    assert answer.tokens.tolist() == prompt + response
    [plain], _ = build(row(), apply_chat_template=False)
    words = tiny_tokenizer("What is 1 + 2 + 3?1 + 2 = 3\n\n3 + 3 = 7<|end|>", add_special_tokens=False)["input_ids"]
    assert tiny_tokenizer.decode(plain.tokens) == tiny_tokenizer.decode(words) and len(plain.ends) == 2


def test_another_separator_and_other_columns(build: Build, tiny_tokenizer: Any) -> None:
    rows = {"prompt": "p", "parts": ["a\n\nb", "c"], "worth": [1, 0]}
    [answer], _ = build(rows, separator=" ; ", steps_key="parts", step_labels_key="worth")
    assert tiny_tokenizer.decode(answer.tokens[: answer.ends[0] + 1]).endswith("a\n\nb ; ")


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        *[(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), (1.0, 1.0), ("+", 1.0), ("-", 0.0)],
        *[(0.25, 0.25), (-100, math.nan), (-100.0, math.nan), (None, math.nan)],
    ],
)
def test_labels_are_hard_or_soft_or_ignored(build: Build, label: Any, expected: float) -> None:
    [answer], _ = build(row(labels=(label, 0)))
    np.testing.assert_equal(answer.labels, np.array([expected, 0.0], dtype=np.float32))


def test_a_step_whose_label_is_ignored_is_not_learned_from(build: Build) -> None:
    """-100 and null are neither true nor false: their tokens are no loss tokens."""
    [answer], _ = build(row(["1 + 1 = 2", "2 + 1 = 3", "3 + 1 = 5"], (-100, None, 0.25)))
    example = step_example(answer)
    assert np.flatnonzero(example.loss_mask).tolist() == [answer.ends[2]]
    assert example.token_fields["step_label"][example.loss_mask].tolist() == [0.25]
    assert answer.labelled == [(2, 0.25)]


def test_what_cannot_be_used_is_dropped_counted_and_named(build: Build) -> None:
    answers, report = build(
        row(),
        row(prompt=" "),
        row([], []),
        row(["a", " "]),
        row(["a", None]),
        row(["a\n\nb", "c"]),
        row(["a", "b"], (1,)),
        row(labels=(None, -100)),
        row(labels=None),
        row(["a" * 80, "b"]),
        row(prompt="What is " + "1 + " * 20 + "1?"),
        row(prompt="held  out"),
        max_prompt_tokens=24,
        exclude={"held out"},
    )
    assert [answer.answer_id for answer in answers] == ["0"]
    assert report.dropped == {
        "empty prompt": [1],
        "no steps": [2],
        "an empty step": [3, 4],
        "the separator within a step": [5],
        "not one label for each step": [6],
        "no step with a label": [7, 8],
        "prompt and response longer than max_tokens (64)": [9],
        "prompt longer than data.max_prompt_tokens (24)": [10],
        "also an evaluation prompt": [11],
    }


def test_steps_that_a_rollout_would_find_elsewhere_are_dropped(build: Build) -> None:
    """`ab` and then `aba` spell a separator at once, with nothing before it."""
    answers, report = build(row(["ab", "c"]), row(["b", "c"]), separator="aba")
    assert [answer.answer_id for answer in answers] == ["1"]
    assert report.dropped == {"steps not separable in their tokens": [0]}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (row(labels=(2, 0)), "row 1: found 2 as label 0 of 'labels'; expected true or false, 1 or 0"),
        (row(labels=(0, -1)), "row 1: found -1 as label 1 of 'labels'"),
        (row(labels=(0, math.nan)), "row 1: found nan as label 1 of 'labels'"),
        (row(labels=("good", 0)), "row 1: found 'good' as label 0 of 'labels'"),
        (row(labels="+-"), "row 1: expected a list of labels in 'labels', found str"),
        (row(steps="one text"), "row 1: expected a list of texts, the steps, in 'completions', found str"),
        (row(steps=["a", 3]), "row 1: expected text as step 1 of 'completions', found int"),
    ],
)
def test_what_are_no_steps_or_labels_is_refused(build: Build, broken: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        build(row(), broken)
    assert str(caught.value).startswith(message)


def test_columns_that_are_missing_are_named(build: Build) -> None:
    with pytest.raises(SlipstreamError, match=r"data\.step_labels_key"):
        build({"prompt": "p", "completions": ["a"]})
