"""A learner rank in preference training equals a plain computation, one answer at a time, however the step is cut."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from slipstream.algorithms.preference_loss import PairObjective, UnpairedObjective
from slipstream.data.labelled_answers import ComparedAnswer, LabelledAnswer, labelled_example, mismatched_example
from slipstream.data.preferences import PreferencePair, answer_examples
from slipstream.training.group import LearnerGroup
from slipstream.workflows.preference import AnswerRow, with_reference, with_reference_point, with_row_mean_weights

# A first step of AdamW then moves the weights by the gradient itself, see test_critic.py.
RATE, EPSILON = 1e3, 1e3
STEP_IS_GRADIENT = {"learning_rate": RATE, "epsilon": EPSILON, "logits_chunk_tokens": 4}
WHOLE, ONE_BY_ONE = 10_000, 1
BETA = 0.3

PAIR_OBJECTIVES = {
    "dpo": PairObjective(loss="dpo", beta=BETA),
    "conservative dpo with an SFT term": PairObjective(loss="dpo", beta=BETA, label_smoothing=0.2, sft_coefficient=0.5),
    "ipo": PairObjective(loss="ipo", beta=BETA),
    "simpo": PairObjective(loss="simpo", beta=2.0, target_margin=0.5),
    "orpo": PairObjective(loss="orpo", beta=BETA),
}
KTO = UnpairedObjective(beta=BETA, desirable_weight=1.5, undesirable_weight=0.5)


def make_pairs(lengths=((5, 9), (9, 9), (14, 3), (4, 6)), seed: int = 0) -> list[AnswerRow]:
    """Pairs of sequences that begin with the same two tokens."""
    generator = np.random.default_rng(seed)
    rows = []
    for number, (first, second) in enumerate(lengths):
        prompt = generator.integers(1, 60, 2)
        answers = [np.concatenate([prompt, generator.integers(1, 60, length - 2)]) for length in (first, second)]
        masks = [np.arange(length) >= 2 for length in (first, second)]
        rows.append(AnswerRow(tuple(answer_examples(PreferencePair(str(number), *answers, *masks)))))
    return rows


def make_single_answers(lengths=(5, 9, 12, 4, 6), seed: int = 2) -> list[AnswerRow]:
    """Answers that begin at the third token, the first two of three desirable, each with one to another prompt."""
    generator = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        tokens = generator.integers(1, 60, length)
        answer = LabelledAnswer(number, str(number), tokens, np.arange(length) >= 2, is_desirable=number % 3 < 2)
        mismatched = np.concatenate([answer.tokens[:2], generator.integers(1, 60, 5)])
        compared = ComparedAnswer(answer, mismatched, np.arange(7) >= 2)
        rows.append(AnswerRow((labelled_example(answer),), mismatched_example(compared)))
    return rows


@pytest.fixture
def group(one_rank_group):
    """group(folder, tokens, per_unit, **changes): one rank as the controller sees it; by default of pairs."""

    def make(folder, tokens: int = WHOLE, per_unit: int = 2, **changes) -> LearnerGroup:
        return one_rank_group(folder, tokens, per_unit, **changes)

    return make


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory, helpers, model_folder):
    """A reference that is not the policy: the tiny model a little moved."""
    model = load_plainly(model_folder).float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("reference")
    model.save_pretrained(folder)
    return folder


def load_plainly(folder):
    """In float64, so that all rounding is ours."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)


def plain_log_probs(model, example) -> torch.Tensor:
    """What Transformers makes of one sequence alone: the log-prob of each token of its answer."""
    tokens = torch.as_tensor(example.tokens)
    every = torch.log_softmax(model(tokens.unsqueeze(0)).logits[0], dim=-1)[:-1]
    return every.gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1)[torch.as_tensor(example.loss_mask[1:])]


def plain_pair_loss(objective: PairObjective, policy, reference, row: AnswerRow) -> torch.Tensor:
    chosen, rejected = (plain_log_probs(policy, example) for example in row.examples)
    with torch.no_grad():
        chosen_reference, rejected_reference = (plain_log_probs(reference, example).sum() for example in row.examples)
    difference = (chosen.sum() - chosen_reference) - (rejected.sum() - rejected_reference)
    beta, smoothing = objective.beta, objective.label_smoothing
    if objective.loss == "dpo":
        loss = -(1 - smoothing) * logsigmoid(beta * difference) - smoothing * logsigmoid(-beta * difference)
        return loss - objective.sft_coefficient * chosen.mean()
    if objective.loss == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    if objective.loss == "simpo":
        return -logsigmoid(beta * chosen.mean() - beta * rejected.mean() - objective.target_margin)
    odds = [answer.mean().exp() / (1 - answer.mean().exp()) for answer in (chosen, rejected)]
    return -chosen.mean() - beta * logsigmoid(torch.log(odds[0] / odds[1]))


def plain_kto_loss(policy, reference, rows: list[AnswerRow]) -> tuple[torch.Tensor, float]:
    """The loss of the whole step, and the reference point."""

    def ratio(example) -> torch.Tensor:
        return plain_log_probs(policy, example).sum() - plain_log_probs(reference, example).sum().detach()

    with torch.no_grad():
        point = torch.stack([ratio(row.mismatched) for row in rows]).mean().clamp(min=0)
    losses = []
    for number, row in enumerate(rows):
        distance = ratio(row.examples[0]) - point
        is_desirable = number % 3 < 2
        value = torch.sigmoid(BETA * distance) if is_desirable else torch.sigmoid(-BETA * distance)
        losses.append((1.5 if is_desirable else 0.5) * (1 - value))
    return torch.stack(losses).mean(), point.item()


def as_step(model) -> dict[str, torch.Tensor]:
    """A first step of AdamW: the rate times g / (|g| + epsilon)."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: RATE * gradient / (gradient.abs() + EPSILON) for name, gradient in gradients.items()}


@pytest.mark.parametrize("tokens", [WHOLE, ONE_BY_ONE], ids=["packed", "pair by pair"])
@pytest.mark.parametrize("objective", PAIR_OBJECTIVES.values(), ids=PAIR_OBJECTIVES.keys())
def test_a_step_on_pairs_is_that_of_a_plain_computation(
    objective, tokens, group, model_folder, other_model_folder, helpers
):
    rows, policy, reference = make_pairs(), load_plainly(model_folder), load_plainly(other_model_folder)
    loss = torch.stack([plain_pair_loss(objective, policy, reference, row) for row in rows]).mean()
    loss.backward()
    with_both = with_reference(rows, group(other_model_folder, tokens), role="policy")
    ours = group(model_folder, tokens, training={"zero_stage": 0, **STEP_IS_GRADIENT})
    metrics, gradient = helpers.step_of(ours, with_row_mean_weights(with_both), objective)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert max(values.abs().max() for values in gradient.values()) > 1e-2
    assert helpers.relative_difference(gradient, as_step(policy)) <= 1e-5


@pytest.mark.parametrize("tokens", [WHOLE, ONE_BY_ONE], ids=["packed", "answer by answer"])
def test_a_step_of_kto_is_that_of_a_plain_computation(tokens, group, model_folder, other_model_folder, helpers):
    rows, policy, reference = make_single_answers(), load_plainly(model_folder), load_plainly(other_model_folder)
    loss, point = plain_kto_loss(policy, reference, rows)
    loss.backward()
    ours = group(model_folder, tokens, 1, training={"zero_stage": 0, **STEP_IS_GRADIENT})
    prepared = with_reference(rows, group(other_model_folder, tokens, 1), role="policy")
    prepared = with_reference_point(prepared, ours)
    metrics, gradient = helpers.step_of(ours, with_row_mean_weights(prepared), KTO)
    assert point > 0.1 and metrics["kl"] == pytest.approx(point, rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    # Answers pull against each other here, so that float32 alone comes near to 1e-5, on some processors above.
    rounded = load_plainly(model_folder).float()
    plain_kto_loss(rounded, load_plainly(other_model_folder).float(), rows)[0].backward()
    rounding = helpers.relative_difference(as_step(rounded), as_step(policy))
    assert helpers.relative_difference(gradient, as_step(policy)) <= max(1e-5, 2 * rounding)


CUTS: dict[str, Callable] = {
    "one by one": lambda units: units,
    "reversed": lambda units: [list(chain.from_iterable(reversed(units)))],
    "with zero-weight micro-batches": lambda units: [[], units[3] + units[0], [], units[1] + units[2], []],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_step_does_not_depend_on_how_it_is_cut(
    loss, stage, cut, group, learner, model_folder, other_model_folder, helpers
):
    rows = make_pairs() if loss == "dpo" else make_single_answers()[:4]
    size = len(rows[0].examples)
    prepared = with_reference(rows, group(other_model_folder, WHOLE, size), role="policy")
    if loss == "kto":
        prepared = with_reference_point(prepared, group(model_folder, WHOLE, 1))
    objective = KTO if loss == "kto" else PAIR_OBJECTIVES["conservative dpo with an SFT term"]
    examples = with_row_mean_weights(prepared)
    units = [examples[start : start + size] for start in range(0, len(examples), size)]
    gradients, metrics = [], []
    for micro_batches in ([examples], cut(units)):
        rank = learner(model_folder, temperature=1.0, training={"zero_stage": stage, **STEP_IS_GRADIENT})
        before = helpers.weights(rank)
        metrics.append(rank.update(micro_batches, objective))
        gradients.append({name: before[name] - after for name, after in helpers.weights(rank).items()})
    assert helpers.relative_difference(gradients[1], gradients[0]) <= 1e-5
    assert {"accuracy", "reward_margin", "chosen_reward", "rejected_reward", "rejected_log_prob"} <= metrics[0].keys()
    for name in metrics[0].keys() - {"seconds"}:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-6), name


def test_a_policy_that_is_its_reference_finds_all_pairs_alike_and_learns_to_tell_them_apart(group, model_folder):
    ours, rows = group(model_folder, load_reference=True), make_pairs()

    def step() -> dict:
        examples = with_row_mean_weights(with_reference(rows, ours, role="reference"))
        return ours.update([examples], PAIR_OBJECTIVES["dpo"])

    first = step()
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert (first["accuracy"], first["reward_margin"]) == (0.5, 0.0)
    for _ in range(15):
        last = step()
    assert last["accuracy"] == 1.0 and last["loss"] < 0.5 * first["loss"] and last["reward_margin"] > 0.5


def test_log_probs_cached_before_the_first_step_are_those_of_the_reference_after_it(group, model_folder):
    ours, rows = group(model_folder, load_reference=True), make_pairs()
    cached = with_reference(rows, ours, role="policy")
    ours.update([with_row_mean_weights(cached)], PAIR_OBJECTIVES["dpo"])
    for before, after in zip(cached, with_reference(rows, ours, role="reference"), strict=True):
        for ours_, theirs in zip(before.examples, after.examples, strict=True):
            np.testing.assert_array_equal(
                ours_.token_fields["reference_log_probs"], theirs.token_fields["reference_log_probs"]
            )
    moved = with_reference(rows, ours, role="policy")[0].examples[0].token_fields["reference_log_probs"]
    assert not np.allclose(moved[2:], cached[0].examples[0].token_fields["reference_log_probs"][2:])


def test_the_reference_point_is_never_below_zero(group, model_folder, other_model_folder):
    rows, ours, theirs = make_single_answers(), group(model_folder, WHOLE, 1), group(other_model_folder, WHOLE, 1)
    prepared = with_reference(rows, theirs, role="policy")
    # As if the reference found the mismatched answers far more likely than the policy does.
    raised = [
        replace(
            row,
            mismatched=replace(
                row.mismatched,
                token_fields={"reference_log_probs": row.mismatched.token_fields["reference_log_probs"] + 100},
            ),
        )
        for row in prepared
    ]
    for example in (each.examples[0] for each in with_reference_point(raised, ours)):
        assert set(example.token_fields["reference_point"][example.loss_mask]) == {0.0}


def test_weights_of_a_step_make_every_row_count_the_same():
    examples = with_row_mean_weights(make_pairs(((5, 9), (14, 3))))
    sums = [float(example.token_fields["weight"][example.loss_mask].sum()) for example in examples]
    assert sums[0] + sums[1] == pytest.approx(1 / 2) and sums[2] + sums[3] == pytest.approx(1 / 2)
    assert examples[0].token_fields["weight"][-1] == pytest.approx(1 / (2 * 10))


def test_a_pair_that_is_not_finite_skips_the_step_and_is_named(group, model_folder, helpers):
    ours = group(model_folder)
    examples = with_row_mean_weights(with_reference(make_pairs(), ours, role="policy"))
    broken = examples[2].token_fields | {"reference_log_probs": np.full(9, np.nan, np.float32)}
    examples[2] = replace(examples[2], token_fields=broken)
    before = helpers.weights(ours.ranks[0].learner)
    metrics = ours.update([examples], PAIR_OBJECTIVES["dpo"])
    assert metrics["skipped"] == 1 and metrics["nonfinite_examples"] == ["1/chosen", "1/rejected"]
    assert helpers.identical(helpers.weights(ours.ranks[0].learner), before)
