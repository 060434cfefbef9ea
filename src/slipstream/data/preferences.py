"""Preferences become pairs of sequences: a prompt with the better answer, and the same prompt with the worse one.

Stands between `data/source.py` and the workflows that learn from pairs. Both sequences are rendered as supervised
fine-tuning renders one (`data/conversation.py`) and end with the token that ends the answer, as a finished rollout
does. Nothing is cut; pairs that cannot be used are counted and named.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.data.answers import split_row, split_table
from slipstream.data.columns import Layout, load_table
from slipstream.data.conversation import NO_RESPONSE, masked_answer, require_length
from slipstream.data.prompts import DropReport, RowDroppedError, check_rendering, read_rows, require_usable_prompt
from slipstream.data.source import Row
from slipstream.data.trajectory import BoolArray, IntArray, TrainingExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOO_LONG_PAIR = "an answer with its prompt longer than max_tokens"
SAME_ANSWERS = "both answers are the same"


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, each as the tokens of prompt and answer.

    `pair_id` is the number of the row in its source, behind the name of the source where several are mixed.
    `chosen_mask` and `rejected_mask` are True on the answers' tokens.
    """

    pair_id: str
    chosen: IntArray
    rejected: IntArray
    chosen_mask: BoolArray
    rejected_mask: BoolArray

    @property
    def tokens(self) -> IntArray:
        """Both sequences, one after the other: what tells the pair from others."""
        return np.concatenate([self.chosen, self.rejected])


def build_preference_pairs(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    *,
    exclude: Collection[str] = frozenset(),
    id_prefix: str = "",
) -> tuple[list[PreferencePair], DropReport]:
    """Pairs of one source in its order, and a report of the rows that are not among them.

    Answers may be text or messages, beside their prompt or behind it in the same cell (`data/answers.py`).

    Left out and counted: empty prompts, empty answers, pairs of equal answers, pairs of which a sequence is longer than
    `max_tokens` or the prompt longer than `max_prompt_tokens` (never cut), rows whose `prompt_identity` is in
    `exclude`, rows whose answer cannot be told apart from the prompt in the template's render, and conversations that
    have no common prompt.

    Raises DataError, ModelError and ConfigError as `build_prompts` does.
    """
    table = split_table(load_table(config, Layout.PAIRS), Layout.PAIRS)
    config = table.config
    check_rendering(config, tokenizer)

    def read(number: int, row: Row) -> PreferencePair:
        row = split_row(number, row, config, Layout.PAIRS)
        require_usable_prompt(number, row, config, exclude)
        chosen, chosen_mask = _sequence(number, row, config.chosen_key, max_tokens, config=config, tokenizer=tokenizer)
        rejected, rejected_mask = _sequence(
            number, row, config.rejected_key, max_tokens, config=config, tokenizer=tokenizer
        )
        if np.array_equal(chosen, rejected):
            raise RowDroppedError(SAME_ANSWERS)
        return PreferencePair(f"{id_prefix}{number}", chosen, rejected, chosen_mask, rejected_mask)

    return read_rows(table, read)


def pair_examples(pairs: Sequence[PreferencePair]) -> list[TrainingExample]:
    """Two examples of each pair, the better answer first. The last token of each is the one it is scored at."""
    return [
        TrainingExample(
            example_id=f"{pair.pair_id}/{name}",
            tokens=tokens,
            loss_mask=np.arange(len(tokens)) == len(tokens) - 1,
            token_fields={"is_chosen": np.full(len(tokens), float(is_chosen), dtype=np.float32)},
        )
        for pair in pairs
        for name, tokens, is_chosen in (("chosen", pair.chosen, True), ("rejected", pair.rejected, False))
    ]


def answer_examples(pair: PreferencePair) -> list[TrainingExample]:
    """The two examples of a pair, the better answer first, for a policy: the loss covers all tokens of the answers."""
    answers = (("chosen", pair.chosen, pair.chosen_mask), ("rejected", pair.rejected, pair.rejected_mask))
    return [
        TrainingExample(
            example_id=f"{pair.pair_id}/{name}",
            tokens=tokens,
            loss_mask=mask,
            token_fields={"is_chosen": np.full(len(tokens), float(name == "chosen"), dtype=np.float32)},
        )
        for name, tokens, mask in answers
    ]


def _sequence(
    number: int,
    row: Row,
    column: str,
    max_tokens: int,
    *,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
) -> tuple[IntArray, BoolArray]:
    """Tokens of prompt and answer, and which of them are the answer's."""
    try:
        tokens, is_answer = masked_answer(number, row, column, config=config, tokenizer=tokenizer)
    except RowDroppedError as dropped:
        if str(dropped) != NO_RESPONSE:
            raise
        raise RowDroppedError(f"{NO_RESPONSE} in {column!r}") from None
    require_length(tokens, is_answer, max_tokens, config=config, reason=TOO_LONG_PAIR)
    return np.asarray(tokens, dtype=np.int64), np.asarray(is_answer, dtype=bool)
