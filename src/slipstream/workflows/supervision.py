"""What a reward model learns from: pairs of answers, or answers whose steps have labels.

What differs between the two is here: rows, examples, objective, how results are counted, what an export holds beside
the weights. The training itself is in `workflows/reward_model.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from slipstream.config.data import DataConfig
from slipstream.config.reward_model import SCORE_MOMENTS, STEP_SEPARATOR, RewardModelConfig
from slipstream.data.columns import Layout
from slipstream.data.cursor import Tokenized
from slipstream.data.preferences import PreferencePair, build_preference_pairs, pair_examples
from slipstream.data.prompts import DropReport
from slipstream.data.steps import LabelledSteps, build_labelled_steps, step_example
from slipstream.data.tokenizer import load_tokenizer
from slipstream.data.trajectory import FloatArray, TrainingExample
from slipstream.observe.files import write_json_atomically
from slipstream.observe.scores import ScoredItem
from slipstream.rewards.steps import step_probabilities

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.algorithms.objective import Objective

Item = TypeVar("Item", bound=Tokenized)


class Supervision(Protocol, Generic[Item]):
    """One kind of what is learned from. An item is what is never divided: a pair, or an answer."""

    layout: Layout
    items_name: str

    def build(
        self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, exclude: frozenset[str], id_prefix: str
    ) -> tuple[list[Item], DropReport]:
        """The items of one source. Raises DataError, ModelError and ConfigError."""
        ...

    def examples(self, items: Sequence[Item]) -> list[TrainingExample]:
        """What the learner needs of items, one item after the other."""
        ...

    def objective(self) -> Objective:
        """What the learner minimizes. Imports torch."""
        ...

    def counted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The learner's metrics with `tokens`, the number of loss tokens, in units of this kind."""
        ...

    def scored(self, items: Sequence[Item], scores: Mapping[str, FloatArray]) -> list[ScoredItem]:
        """Each score on its own, from those of the loss tokens by example id."""
        ...

    def results(self, measured: Mapping[str, float]) -> dict[str, Any]:
        """What the summary says of a measurement besides the accuracy."""
        ...

    def complete_export(self, folder: Path, items: Sequence[Item], results: Mapping[str, Any]) -> None:
        """Write into an exported config.json what only the training knows; `items` are those learned from."""
        ...


class PairSupervision:
    """Pairs of a better and a worse answer: the model scores whole answers."""

    layout = Layout.PAIRS
    items_name = "pairs"

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config

    def build(
        self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, exclude: frozenset[str], id_prefix: str
    ) -> tuple[list[PreferencePair], DropReport]:
        """See `Supervision`."""
        return build_preference_pairs(data, tokenizer, self._config.max_tokens, exclude=exclude, id_prefix=id_prefix)

    def examples(self, items: Sequence[PreferencePair]) -> list[TrainingExample]:
        """Two of each pair, the better answer first."""
        return pair_examples(items)

    def objective(self) -> Objective:
        """See `Supervision`."""
        # Only here: it imports torch, and bad input is to be refused at once.
        from slipstream.algorithms.reward_model_loss import RewardModelObjective

        return RewardModelObjective(margin=self._config.margin, label_smoothing=self._config.label_smoothing)

    def counted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """In pairs: each has two loss tokens."""
        return {"pairs": metrics["tokens"] / 2, **_without_tokens(metrics)}

    def scored(self, items: Sequence[PreferencePair], scores: Mapping[str, FloatArray]) -> list[ScoredItem]:
        """The scores of the two answers of each pair."""
        return [
            ScoredItem(item=pair.pair_id, group=name, score=float(scores[f"{pair.pair_id}/{name}"][0]))
            for pair in items
            for name in ("chosen", "rejected")
        ]

    def results(self, measured: Mapping[str, float]) -> dict[str, Any]:
        """The moments of the scores."""
        return {SCORE_MOMENTS: {"mean": measured["score_mean"], "std": measured["score_std"]}}

    def complete_export(self, folder: Path, items: Sequence[PreferencePair], results: Mapping[str, Any]) -> None:
        """The moments of the scores, and the padding token.

        Transformers scores a padded sequence at its last token that is no padding; where answers end with that very
        token it would read another place, so there is no padding token then, and Transformers takes sequences one by
        one.
        """
        padding_token = load_tokenizer(self._config.model.path).pad_token_id
        ends = {int(tokens[-1]) for pair in items for tokens in (pair.chosen, pair.rejected)}
        padding = {"pad_token_id": None if padding_token in ends else padding_token}
        _add_settings(folder, {SCORE_MOMENTS: results[SCORE_MOMENTS]} | padding)


class StepSupervision:
    """Answers whose steps have labels: the model scores each step."""

    layout = Layout.LABELLED_STEPS
    items_name = "answers"

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config

    def build(
        self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, exclude: frozenset[str], id_prefix: str
    ) -> tuple[list[LabelledSteps], DropReport]:
        """See `Supervision`."""
        return build_labelled_steps(
            data,
            tokenizer,
            self._config.max_tokens,
            separator=self._config.step_separator,
            exclude=exclude,
            id_prefix=id_prefix,
        )

    def examples(self, items: Sequence[LabelledSteps]) -> list[TrainingExample]:
        """One of each answer."""
        return [step_example(answer) for answer in items]

    def objective(self) -> Objective:
        """See `Supervision`."""
        # Only here: it imports torch, and bad input is to be refused at once.
        from slipstream.algorithms.step_loss import StepObjective

        return StepObjective()

    def counted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """In steps that have a label: each has one loss token."""
        return {"labelled_steps": metrics["tokens"], **_without_tokens(metrics)}

    def scored(self, items: Sequence[LabelledSteps], scores: Mapping[str, FloatArray]) -> list[ScoredItem]:
        """The probabilities of the steps that have a label."""
        from slipstream.algorithms.step_loss import TRUE_FROM

        return [
            ScoredItem(item=answer.answer_id, group="true" if label >= TRUE_FROM else "false", score=score, step=step)
            for answer in items
            for (step, label), score in zip(
                answer.labelled, step_probabilities(scores[answer.answer_id].tolist()), strict=True
            )
        ]

    def results(self, measured: Mapping[str, float]) -> dict[str, Any]:
        """How many of the steps are right: what the accuracy is to be compared with."""
        return {"true_share": measured["true_share"]}

    def complete_export(self, folder: Path, items: Sequence[LabelledSteps], results: Mapping[str, Any]) -> None:
        """What stands between steps."""
        _add_settings(folder, {STEP_SEPARATOR: self._config.step_separator})


def supervision_of(config: RewardModelConfig) -> Supervision[Any]:
    """What a configuration says is learned from."""
    return PairSupervision(config) if config.supervision == "pairs" else StepSupervision(config)


def _without_tokens(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "tokens"}


def _add_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    file = folder / "config.json"
    write_json_atomically(file, json.loads(file.read_text(encoding="utf-8")) | dict(settings))
