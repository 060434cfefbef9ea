"""A learner rank in the role of the reward model: pairs in, the score of each whole sequence learned from."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from slipstream.algorithms.reward_model_loss import RewardModelObjective
from slipstream.data.packing import pack
from slipstream.data.preferences import PreferencePair, pair_examples
from slipstream.data.trajectory import TrainingExample
from slipstream.training import group as group_module
from slipstream.training.group import LearnerGroup

STAGES = (0, 1, 2, 3)
OBJECTIVE = RewardModelObjective(margin=0.3, label_smoothing=0.1)
# A first step of AdamW then moves the weights by the gradient itself, see test_critic.py.
STEP_IS_GRADIENT = {"learning_rate": 1e3, "epsilon": 1e3}


def make_pairs(lengths=((5, 9), (9, 9), (14, 3), (4, 6)), seed: int = 0) -> list[PreferencePair]:
    """Pairs of sequences that begin with the same two tokens."""
    generator = np.random.default_rng(seed)
    pairs = []
    for row, (first, second) in enumerate(lengths):
        prompt = generator.integers(1, 60, 2)
        answers = [np.concatenate([prompt, generator.integers(1, 60, length - 2)]) for length in (first, second)]
        masks = [np.arange(len(answer)) >= 2 for answer in answers]
        pairs.append(PreferencePair(str(row), *answers, *masks))
    return pairs


def weighted(pairs: list[PreferencePair], total: int = 4) -> list[list[TrainingExample]]:
    """The two examples of each pair, with the weights of a step of `total` pairs."""

    def with_weight(example: TrainingExample) -> TrainingExample:
        weight = np.full(len(example.tokens), 1 / (2 * total), dtype=np.float32)
        return replace(example, token_fields={**example.token_fields, "weight": weight})

    examples = [with_weight(example) for example in pair_examples(pairs)]
    return [examples[start : start + 2] for start in range(0, len(examples), 2)]


def joined(pairs: Iterable[list[TrainingExample]]) -> list[TrainingExample]:
    return list(chain.from_iterable(pairs))


@pytest.fixture
def reward_model(learner, reward_model_folder):
    """reward_model(folder, training=...): a started reward model of one rank, by default one with a head."""

    def make(folder=reward_model_folder, **changes):
        return learner(folder, role="reward_model", **changes)

    return make


def plain_score(model, tokens: np.ndarray) -> torch.Tensor:
    """What Transformers makes of one sequence."""
    return model(torch.as_tensor(tokens).unsqueeze(0)).logits.squeeze()


def load_plainly(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_is_that_of_a_plain_computation(stage, reward_model, reward_model_folder, helpers):
    pairs, model = make_pairs(), load_plainly(reward_model_folder)
    losses = []
    for pair in pairs:
        difference = plain_score(model, pair.chosen) - plain_score(model, pair.rejected)
        losses.append(-0.9 * torch.sigmoid(difference - 0.3).log() - 0.1 * torch.sigmoid(-difference - 0.3).log())
    loss = torch.stack(losses).mean()
    loss.backward()
    rank = reward_model(training={"zero_stage": stage, **STEP_IS_GRADIENT})
    before = helpers.weights(rank)
    metrics = rank.update([joined(weighted(pairs))], OBJECTIVE)
    found = {name: before[name] - after for name, after in helpers.weights(rank).items()}
    # A first step of AdamW: the rate times g / (|g| + epsilon).
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: 1e3 * gradient / (gradient.abs() + 1e3) for name, gradient in gradients.items()}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert helpers.relative_difference(found, expected) <= 1e-4


CUTS: dict[str, Callable] = {
    "one by one": lambda p: p,
    "reversed": lambda p: [joined(reversed(p))],
    "with zero-weight micro-batches": lambda p: [[], p[3] + p[0], [], p[1] + p[2], []],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("stage", (0, 3))
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(stage, cut, reward_model, helpers):
    pairs, gradients, metrics = weighted(make_pairs()), [], []
    for micro_batches in ([joined(pairs)], cut(pairs)):
        rank = reward_model(training={"zero_stage": stage, **STEP_IS_GRADIENT})
        before = helpers.weights(rank)
        metrics.append(rank.update(micro_batches, OBJECTIVE))
        gradients.append({name: before[name] - after for name, after in helpers.weights(rank).items()})
    assert max(gradient.abs().max() for gradient in gradients[0].values()) > 1e-2
    assert helpers.relative_difference(gradients[1], gradients[0]) <= 1e-5
    assert {"accuracy", "score_margin", "chosen_score", "rejected_score", "score_std"} <= metrics[0].keys()
    for name in metrics[0].keys() - {"seconds"}:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-6), name


def test_metrics_are_over_pairs_and_scores(reward_model, reward_model_folder):
    pairs, model = make_pairs(), load_plainly(reward_model_folder)
    scores = np.array([[plain_score(model, t).item() for t in (pair.chosen, pair.rejected)] for pair in pairs])
    found = reward_model().loss([joined(weighted(pairs))], OBJECTIVE)
    assert found["accuracy"] == np.mean(scores[:, 0] > scores[:, 1])
    assert found["chosen_score"] == pytest.approx(scores[:, 0].mean(), rel=1e-4)
    assert found["rejected_score"] == pytest.approx(scores[:, 1].mean(), rel=1e-4)
    assert found["score_margin"] == pytest.approx((scores[:, 0] - scores[:, 1]).mean(), rel=1e-4)
    assert found["score_mean"] == pytest.approx(scores.mean(), rel=1e-4)
    assert found["score_std"] == pytest.approx(scores.std(), rel=1e-4)


def test_a_language_model_finds_all_answers_alike_and_learns_to_tell_them_apart(reward_model, model_folder):
    rank, examples = reward_model(model_folder), joined(weighted(make_pairs()))
    first = rank.update([examples], RewardModelObjective())
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5) and first["accuracy"] == 0.5
    for _ in range(20):
        last = rank.update([examples], RewardModelObjective())
    assert last["accuracy"] == 1.0 and last["loss"] < 0.5 * first["loss"]


def test_an_answer_that_is_not_finite_skips_the_step_and_names_its_pair(reward_model, helpers):
    examples = joined(weighted(make_pairs()))
    broken = {**examples[2].token_fields, "weight": np.full(9, np.nan, np.float32)}
    rank = reward_model()
    before = helpers.weights(rank)
    metrics = rank.update([examples[:2], [replace(examples[2], token_fields=broken), *examples[3:]]], OBJECTIVE)
    assert metrics["skipped"] == 1 and metrics["nonfinite_examples"] == ["1/chosen"]
    assert helpers.identical(helpers.weights(rank), before)


def test_training_goes_on_bit_for_bit_from_a_checkpoint(reward_model, model_folder, helpers, tmp_path):
    steps = [joined(weighted(make_pairs(seed=seed))) for seed in range(3)]
    straight, resumed = reward_model(model_folder), reward_model(model_folder)
    straight.update([steps[0]], OBJECTIVE)
    straight.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    for examples in steps[1:]:
        before, after = (rank.update([examples], OBJECTIVE) for rank in (straight, resumed))
        assert {**after, "seconds": 0} == {**before, "seconds": 0}
    assert helpers.identical(helpers.weights(resumed), helpers.weights(straight))


class Rank:
    """Stands for a remote rank and keeps what it was given."""

    name = "rank"

    def submit(self, _method: str, micro_batches: list, *_arguments: object) -> dict:
        self.micro_batches = micro_batches
        return {"loss": 0.0}


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1), (1, 24), (2, 20), (3, 10_000)])
def test_a_pair_always_sits_in_one_micro_batch_in_its_order(ranks, tokens, monkeypatch):
    monkeypatch.setattr(group_module, "gather", lambda calls, deadline_s: list(calls))
    stand_ins = [Rank() for _ in range(ranks)]
    group = LearnerGroup(stand_ins, tokens_per_micro_batch=tokens, call_timeout_s=1.0, examples_per_unit=2)
    group.loss(pair_examples(make_pairs()), OBJECTIVE)
    found = []
    for batch in (batch for rank in stand_ins for batch in rank.micro_batches):
        names = [example.example_id for example in batch]
        assert len(names) == 2 or len(pack(batch).tokens) <= tokens
        found += [tuple(names[start : start + 2]) for start in range(0, len(names), 2)]
    assert sorted(found) == [(f"{row}/chosen", f"{row}/rejected") for row in range(4)]
    assert len({len(rank.micro_batches) for rank in stand_ins}) == 1
