"""Preferences become pairs of sequences: a prompt with the better answer, and the same prompt with the worse one.

Stands between `data/source.py` and the reward-model workflow. Both sequences are rendered as supervised fine-tuning
renders one (`data/conversation.py`) and end with the token that ends the answer, as a finished rollout does. Nothing is
cut; pairs that cannot be used are counted and named.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config.schema import DataConfig
from slipstream.data.conversation import NO_RESPONSE, RowDroppedError, masked_answer, require_usable_prompt
from slipstream.data.prompts import TOO_LONG_PROMPT, DropReport, check_rendering
from slipstream.data.source import Row, load_rows
from slipstream.data.trajectory import IntArray, TrainingExample
from slipstream.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOO_LONG_PAIR = "an answer with its prompt longer than max_tokens"
SAME_ANSWERS = "both answers are the same"


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, each as the tokens of prompt and answer. `row` is the number in the source."""

    row: int
    chosen: IntArray
    rejected: IntArray

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
) -> tuple[list[PreferencePair], DropReport]:
    """Pairs in the order of the source, and a report of the rows that are not among them.

    Left out and counted: empty prompts, empty answers, pairs of equal answers, pairs of which a sequence is longer than
    `max_tokens` or the prompt longer than `max_prompt_tokens` (never cut), rows whose `prompt_identity` is in
    `exclude`, and rows whose answer cannot be told apart from the prompt in the template's render.

    Raises DataError, ModelError and ConfigError as `build_prompts` does.
    """
    if config.chosen_key is None or config.rejected_key is None:
        raise ConfigError("data.chosen_key and data.rejected_key must name the columns with the two answers")
    check_rendering(config, tokenizer)
    rows = load_rows(config)
    report = DropReport(total=len(rows))
    pairs = []
    for number, row in enumerate(rows):
        try:
            require_usable_prompt(number, row, config, exclude)
            chosen = _sequence(number, row, config.chosen_key, max_tokens, config=config, tokenizer=tokenizer)
            rejected = _sequence(number, row, config.rejected_key, max_tokens, config=config, tokenizer=tokenizer)
            if np.array_equal(chosen, rejected):
                raise RowDroppedError(SAME_ANSWERS)
        except RowDroppedError as dropped:
            report.drop(number, str(dropped))
            continue
        pairs.append(PreferencePair(number, chosen, rejected))
    if not pairs:
        raise DataError(f"data.source: no row of {config.source!r} is left to use: {report}")
    return pairs, report


def pair_examples(pairs: Sequence[PreferencePair]) -> list[TrainingExample]:
    """Two examples of each pair, the better answer first. The last token of each is the one it is scored at."""
    return [
        TrainingExample(
            example_id=f"{pair.row}/{name}",
            tokens=tokens,
            loss_mask=np.arange(len(tokens)) == len(tokens) - 1,
            token_fields={"is_chosen": np.full(len(tokens), float(is_chosen), dtype=np.float32)},
        )
        for pair in pairs
        for name, tokens, is_chosen in (("chosen", pair.chosen, True), ("rejected", pair.rejected, False))
    ]


def _sequence(
    number: int,
    row: Row,
    column: str,
    max_tokens: int,
    *,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
) -> IntArray:
    try:
        tokens, is_answer = masked_answer(number, row, column, config=config, tokenizer=tokenizer)
    except RowDroppedError as dropped:
        if str(dropped) != NO_RESPONSE:
            raise
        raise RowDroppedError(f"{NO_RESPONSE} in {column!r}") from None
    if is_answer.index(True) > config.max_prompt_tokens:
        raise RowDroppedError(f"{TOO_LONG_PROMPT} ({config.max_prompt_tokens})")
    if len(tokens) > max_tokens:
        raise RowDroppedError(f"{TOO_LONG_PAIR} ({max_tokens})")
    return np.asarray(tokens, dtype=np.int64)
