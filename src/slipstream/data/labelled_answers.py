"""Answers with a label become sequences: a prompt with one answer, and whether that answer is a good one.

Stands between `data/source.py` and the preference workflow, for KTO. Sequences are rendered as supervised fine-tuning
renders them (`data/conversation.py`). Beside each comes the same prompt with the answer to another one, on which the
divergence of the policy is measured. Nothing is cut; rows that cannot be used are counted and named.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.data.answers import split_row, split_table
from slipstream.data.columns import Layout, cell, load_table
from slipstream.data.conversation import masked_answer, require_length
from slipstream.data.prompts import (
    MISSING_LABEL,
    DropReport,
    RowDroppedError,
    check_rendering,
    is_blank,
    read_rows,
    require_rows,
    require_usable_prompt,
)
from slipstream.data.source import Row
from slipstream.data.trajectory import BoolArray, IntArray, TrainingExample
from slipstream.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_OTHER_ANSWER = "no answer to another prompt fits within max_tokens"
LABELS = {"true": True, "false": False}
"""What a label may be in a file that only has text."""


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer as the tokens of prompt and answer; `mask` is True on the answer's.

    `row` is the number in the source, `answer_id` that number behind the name of the source where several are mixed.
    """

    row: int
    answer_id: str
    tokens: IntArray
    mask: BoolArray
    is_desirable: bool

    @property
    def start(self) -> int:
        """Where the answer begins."""
        return int(self.mask.argmax())


@dataclass(frozen=True)
class ComparedAnswer:
    """An answer, and the same prompt with the answer to another one: its tokens, and which of them are the answer's."""

    answer: LabelledAnswer
    mismatched: IntArray
    mismatched_mask: BoolArray


def build_labelled_answers(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    *,
    exclude: Collection[str] = frozenset(),
    id_prefix: str = "",
) -> tuple[list[ComparedAnswer], DropReport]:
    """Answers of one source in its order, and a report of the rows that are not among them.

    With `response_key` equal to `prompt_key` the column holds conversations, whose last message is the answer.

    Left out and counted: empty prompts, empty answers, rows without label, rows longer than `max_tokens` or with a
    prompt longer than `max_prompt_tokens` (never cut), rows whose `prompt_identity` is in `exclude`, rows whose answer
    cannot be told apart from the prompt in the template's render, and rows with whose prompt no answer to another
    prompt fits.

    Raises DataError, also for a label that is neither true nor false, ModelError and ConfigError as `build_prompts`
    does.
    """
    table = split_table(load_table(config, Layout.LABELLED_ANSWERS), Layout.LABELLED_ANSWERS)
    config = table.config
    check_rendering(config, tokenizer)

    def read(number: int, row: Row) -> LabelledAnswer:
        row = split_row(number, row, config, Layout.LABELLED_ANSWERS)
        require_usable_prompt(number, row, config, exclude)
        return _answer(number, row, max_tokens, config=config, tokenizer=tokenizer, id_prefix=id_prefix)

    answers, report = read_rows(table, read)
    if len({answer.tokens[: answer.start].tobytes() for answer in answers}) == 1:
        raise DataError(
            f"data.source: all usable rows of {config.source!r} have the same prompt; kto compares each answer with "
            "answers to other prompts"
        )
    compared = []
    others = _OtherAnswers(answers)
    for place, answer in enumerate(answers):
        other = others.after(place, max_tokens)
        if other is None:
            report.drop(answer.row, NO_OTHER_ANSWER)
        else:
            compared.append(_compared(answer, other))
    require_rows(compared, config, report)
    return compared, report


def labelled_example(answer: LabelledAnswer) -> TrainingExample:
    """The example of an answer; the loss covers all its tokens."""
    return TrainingExample(
        example_id=answer.answer_id,
        tokens=answer.tokens,
        loss_mask=answer.mask,
        token_fields={"is_desirable": np.full(len(answer.tokens), float(answer.is_desirable), dtype=np.float32)},
    )


def mismatched_example(compared: ComparedAnswer) -> TrainingExample:
    """The example of a prompt with the answer to another one, to be measured and never learned from."""
    return TrainingExample(
        example_id=f"{compared.answer.answer_id}/mismatched",
        tokens=compared.mismatched,
        loss_mask=compared.mismatched_mask,
    )


def _answer(
    number: int,
    row: Row,
    max_tokens: int,
    *,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    id_prefix: str,
) -> LabelledAnswer:
    is_desirable = _label(number, row, str(config.label_key))
    tokens, is_answer = masked_answer(number, row, config.response_key, config=config, tokenizer=tokenizer)
    require_length(tokens, is_answer, max_tokens, config=config)
    return LabelledAnswer(
        row=number,
        answer_id=f"{id_prefix}{number}",
        tokens=np.asarray(tokens, dtype=np.int64),
        mask=np.asarray(is_answer, dtype=bool),
        is_desirable=is_desirable,
    )


def _label(number: int, row: Row, column: str) -> bool:
    value = cell(row, column)
    if is_blank(value):
        raise RowDroppedError(MISSING_LABEL)
    label = LABELS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(label, bool):
        raise DataError(f"row {number}: expected true or false in {column!r}, found {value!r}")
    return label


class _OtherAnswers:
    """For each answer the next one in the data to another prompt.

    Fixed by the data and not by the step, so that reference log-probs can be computed before training. Neighbours with
    one prompt are stepped over at once: there may be thousands of them.
    """

    def __init__(self, answers: Sequence[LabelledAnswer]) -> None:
        self._answers = answers
        self._prompts = [answer.tokens[: answer.start].tobytes() for answer in answers]
        # How many follow, itself included, before the prompt is another one.
        self._run = [1] * len(answers)
        for place in range(len(answers) - 2, -1, -1):
            if self._prompts[place] == self._prompts[place + 1]:
                self._run[place] += self._run[place + 1]

    def after(self, place: int, max_tokens: int) -> LabelledAnswer | None:
        """The next answer to another prompt that fits behind the prompt of this one; None if none does."""
        room = max_tokens - self._answers[place].start
        distance = 1
        while distance < len(self._answers):
            other = (place + distance) % len(self._answers)
            if self._prompts[other] == self._prompts[place]:
                distance += self._run[other]
                continue
            answer = self._answers[other]
            if len(answer.tokens) - answer.start <= room:
                return answer
            distance += 1
        return None


def _compared(answer: LabelledAnswer, other: LabelledAnswer) -> ComparedAnswer:
    """An answer, and its prompt with the answer of `other`."""

    def joined(own: np.ndarray, others: np.ndarray) -> np.ndarray:
        return np.concatenate([own[: answer.start], others[other.start :]])

    return ComparedAnswer(answer, joined(answer.tokens, other.tokens), joined(answer.mask, other.mask))
