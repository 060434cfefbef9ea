"""Labelled steps become sequences: a prompt with an answer, whose steps are each right or wrong.

Stands between `data/columns.py` and the training of a process reward model. An answer is its steps with the separator
between them, rendered as supervised fine-tuning renders one (`data/conversation.py`); its steps are then found in its
tokens as they will be in a rollout (`data/step_ends.py`). Nothing is cut; what cannot be used is counted and named.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.data.columns import Layout, cell, load_table
from slipstream.data.conversation import masked_answer, require_length
from slipstream.data.prompts import (
    DropReport,
    RowDroppedError,
    check_rendering,
    is_blank,
    read_rows,
    require_usable_prompt,
)
from slipstream.data.source import Row
from slipstream.data.step_ends import StepEnds
from slipstream.data.trajectory import FloatArray, IntArray, TrainingExample
from slipstream.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_STEPS = "no steps"
EMPTY_STEP = "an empty step"
SEPARATOR_IN_STEP = "the separator within a step"
OTHER_NUMBER = "not one label for each step"
NO_LABEL = "no step with a label"
STEPS_NOT_FOUND = "steps not separable in their tokens"

IGNORED_LABEL = -100
SIGNS = {"+": 1.0, "-": 0.0}


@dataclass(frozen=True)
class LabelledSteps:
    """An answer as the tokens of prompt and answer. `answer_id` tells it from others: its number in the source.

    `ends` are the places of the last tokens of its steps, `labels` how right each of them is: 0 to 1, NaN where that is
    not known and nothing is learned.
    """

    answer_id: str
    tokens: IntArray
    ends: IntArray
    labels: FloatArray

    @property
    def labelled(self) -> list[tuple[int, float]]:
        """The number of each step that has a label, counted from 0, and the label."""
        return [(step, float(label)) for step, label in enumerate(self.labels) if not np.isnan(label)]


@dataclass(frozen=True)
class _Reader:
    """What turns the rows of one source into sequences."""

    config: DataConfig
    tokenizer: "PreTrainedTokenizerBase"
    separator: str
    step_ends: StepEnds
    max_tokens: int
    exclude: Collection[str]

    def read(self, number: int, row: Row, id_prefix: str) -> LabelledSteps:
        """The sequence of a row. Raises RowDroppedError with the reason, DataError for what are no steps or labels."""
        config = self.config
        require_usable_prompt(number, row, config, self.exclude)
        steps = _steps(number, row, config.steps_key)
        labels = _labels(number, row, config.step_labels_key)
        if any(self.separator in step for step in steps):
            raise RowDroppedError(SEPARATOR_IN_STEP)
        if len(labels) != len(steps):
            raise RowDroppedError(OTHER_NUMBER)
        if np.isnan(labels).all():
            raise RowDroppedError(NO_LABEL)
        answer = row | {config.steps_key: self.separator.join(steps)}
        tokens, is_answer = masked_answer(number, answer, config.steps_key, config=config, tokenizer=self.tokenizer)
        require_length(tokens, is_answer, self.max_tokens, config=config)
        sequence = np.asarray(tokens, dtype=np.int64)
        ends = self.step_ends.find(sequence, np.asarray(is_answer, dtype=bool))
        if len(ends) != len(steps):
            raise RowDroppedError(STEPS_NOT_FOUND)
        return LabelledSteps(f"{id_prefix}{number}", sequence, ends, labels)


def build_labelled_steps(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    *,
    separator: str,
    exclude: Collection[str] = frozenset(),
    id_prefix: str = "",
) -> tuple[list[LabelledSteps], DropReport]:
    """Answers of one source in its order, and a report of the rows that are not among them.

    Labels are true or false, 1 or 0, "+" or "-", or a number between 0 and 1. One that is null or -100 is no label:
    nothing is learned at its step.

    Left out and counted: empty prompts, rows without steps, with an empty one or one that holds the separator, with
    another number of labels than of steps, or without any label; rows longer than `max_tokens` or with a prompt longer
    than `max_prompt_tokens` (never cut); rows whose `prompt_identity` is in `exclude`; rows whose answer cannot be told
    apart from the prompt in the template's render, or its steps from each other in its tokens.

    Raises DataError, also for a label that is none, ModelError and ConfigError as `build_prompts` does.
    """
    check_rendering(config, tokenizer)
    step_ends = StepEnds(tokenizer, separator)
    table = load_table(config, Layout.LABELLED_STEPS)
    reader = _Reader(table.config, tokenizer, separator, step_ends, max_tokens, exclude)
    return read_rows(table, lambda number, row: reader.read(number, row, id_prefix))


def step_example(answer: LabelledSteps) -> TrainingExample:
    """The example of an answer; the loss covers the last token of each step that has a label."""
    labels = np.full(len(answer.tokens), np.nan, dtype=np.float32)
    labels[answer.ends] = answer.labels
    return TrainingExample(
        example_id=answer.answer_id,
        tokens=answer.tokens,
        loss_mask=~np.isnan(labels),
        token_fields={"step_label": labels},
    )


def _steps(number: int, row: Row, column: str) -> list[str]:
    steps = cell(row, column)
    if is_blank(steps):
        raise RowDroppedError(NO_STEPS)
    if not isinstance(steps, list):
        raise DataError(
            f"row {number}: expected a list of texts, the steps, in {column!r}, found {type(steps).__name__}"
        )
    for place, step in enumerate(steps):
        if step is not None and not isinstance(step, str):
            raise DataError(f"row {number}: expected text as step {place} of {column!r}, found {type(step).__name__}")
    if any(is_blank(step) for step in steps):
        raise RowDroppedError(EMPTY_STEP)
    return steps


def _labels(number: int, row: Row, column: str) -> FloatArray:
    labels = cell(row, column)
    if is_blank(labels):
        raise RowDroppedError(NO_LABEL)
    if not isinstance(labels, list):
        raise DataError(f"row {number}: expected a list of labels in {column!r}, found {type(labels).__name__}")
    return np.array([_label(number, place, value, column) for place, value in enumerate(labels)], dtype=np.float32)


def _label(number: int, place: int, value: Any, column: str) -> float:
    """A label as a number; NaN for one that is to be ignored."""
    if value is None or (isinstance(value, int | float) and value == IGNORED_LABEL):
        return float("nan")
    label = SIGNS.get(value.strip()) if isinstance(value, str) else value
    if not isinstance(label, int | float) or not 0 <= label <= 1:
        raise DataError(
            f"row {number}: found {value!r} as label {place} of {column!r}; expected true or false, 1 or 0, '+' or "
            f"'-', a number between 0 and 1, or null or {IGNORED_LABEL} for a step without label"
        )
    return float(label)
