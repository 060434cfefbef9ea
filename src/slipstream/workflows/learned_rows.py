"""The rows that a workflow without generation learns from, and those that are held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from slipstream.config.data import DataConfig
from slipstream.config.reward_model import SupervisedConfig
from slipstream.data.answers import evaluation_identities
from slipstream.data.columns import Layout
from slipstream.data.cursor import Tokenized
from slipstream.data.mixture import Mixture, build_mixture
from slipstream.data.prompts import DropReport
from slipstream.data.tokenizer import load_tokenizer
from slipstream.errors import DataError
from slipstream.observe.logs import get_logger
from slipstream.workflows.checks import naming_section

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item", bound=Tokenized)
Build = Callable[[DataConfig, "PreTrainedTokenizerBase", frozenset[str], str], tuple[list[Item], DropReport]]

logger = get_logger("data")


@dataclass(frozen=True)
class LearnedRows(Generic[Item]):
    """Items to train on, and items that are held out (perhaps none)."""

    training: Mixture[Item]
    held_out: list[Item]


def load_learned_rows(config: SupervisedConfig, layout: Layout, build: Build[Item], *, noun: str) -> LearnedRows[Item]:
    """Load and tokenize all rows; rows that are held out are dropped from training. Says what was dropped and why.

    `build` makes the items of one source: given its section, the tokenizer, the identities to leave out, and what is
    to stand before the row numbers.

    Raises DataError, ModelError or ConfigError: call it before a run directory is made.
    """
    tokenizer = load_tokenizer(config.model.path)
    held_out: list[Item] = []
    excluded: frozenset[str] = frozenset()
    if config.evaluation_data is not None:
        mixture = load_mixture(
            config.evaluation_data,
            lambda part, prefix: build(part, tokenizer, frozenset(), prefix),
            key="evaluation_data",
            noun=f"held-out {noun}",
        )
        held_out = mixture.items
        with naming_section("evaluation_data"):
            excluded = evaluation_identities(config.evaluation_data, layout)
    training = load_mixture(
        config.data, lambda part, prefix: build(part, tokenizer, excluded, prefix), key="data", noun=f"training {noun}"
    )
    return LearnedRows(training, held_out)


def load_mixture(
    config: DataConfig,
    build: Callable[[DataConfig, str], tuple[list[Item], DropReport]],
    *,
    key: str,
    noun: str,
) -> Mixture[Item]:
    """The items of all sources of the section at `key`; says what was dropped of each and why.

    Errors name the keys of the source they are about. Raises what `build` does.
    """

    def named(part: DataConfig, prefix: str) -> tuple[list[Item], DropReport]:
        name = prefix.removesuffix(":")
        section = f"{key}.mix.{name}" if name else key
        with naming_section(section):
            try:
                return build(part, prefix)
            except DataError as error:
                if str(error).startswith("row "):  # rows do not know which source they are of
                    raise DataError(f"data.source: {part.source!r}, {error} (rows count from 0)") from None
                raise

    mixture, reports = build_mixture(config, named)
    for name, report in reports.items():
        logger.info(f"{noun} of {name}: {report}" if name else f"{noun}: {report}")
    return mixture
