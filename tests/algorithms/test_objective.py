"""Objectives: what the learner minimizes, on a tiny policy whose gradients can be written down."""

import math
import pickle

import pytest
import torch
from torch import Tensor

from slipstream.algorithms.aggregation import token_mean_weights
from slipstream.algorithms.objective import PolicyObjective, SupervisedObjective

GRPO = PolicyObjective(clip_low=0.2, clip_high=0.28)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def call(objective, log_probs: Tensor, **fields: Tensor):
    return objective(log_probs, torch.zeros_like(log_probs), fields, torch.zeros(len(log_probs), dtype=torch.int64))


def sampled_log_probs(logits: Tensor, tokens: list[int], temperature: float = 1.0) -> Tensor:
    return (logits / temperature).log_softmax(-1)[torch.arange(len(tokens)), tokens]


def test_the_first_on_policy_step_has_ratio_one_and_the_gradient_of_reinforce():
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    log_probs = sampled_log_probs(logits, [3, 0, 6, 2])
    advantages, weight = tensor(1.5, -0.5, -0.5, 0.7), 0.25

    output = call(GRPO, log_probs, advantages=advantages)
    (gradient,) = torch.autograd.grad((output.loss * weight).sum(), logits, retain_graph=True)
    (reinforce,) = torch.autograd.grad(-(weight * advantages * log_probs).sum(), logits)

    torch.testing.assert_close(gradient, reinforce)
    assert output.metrics["ratio"].tolist() == [1.0] * 4
    assert output.metrics["clip_share"].tolist() == [0.0] * 4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_ratio_and_divergence_are_trivial_at_any_one_temperature(temperature):
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    log_probs = sampled_log_probs(logits, [0, 4, 2], temperature)
    metrics = call(GRPO, log_probs, advantages=tensor(1, 1, 1), rollout_log_probs=log_probs.clone()).metrics
    assert metrics["ratio"].tolist() == [1.0] * 3
    assert metrics["mismatch_k3"].tolist() == pytest.approx([0.0] * 3, abs=1e-12)


def test_log_probs_taken_at_another_temperature_than_sampling_show_as_a_mismatch():
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    sampled, trained = sampled_log_probs(logits, [0], 0.6), sampled_log_probs(logits, [0], 1.0)
    metrics = call(GRPO, trained, advantages=torch.ones(1), rollout_log_probs=sampled).metrics
    assert metrics["mismatch_abs"].item() > 0.1


def test_given_old_log_probs_anchor_the_ratio():
    output = call(GRPO, tensor(-1.0, -1.0), old_log_probs=tensor(-1.0, -1.0 - math.log(2)), advantages=tensor(1.0, 1.0))
    assert output.metrics["ratio"].tolist() == pytest.approx([1.0, 2.0])
    assert output.metrics["clip_share"].tolist() == [0.0, 1.0]
    assert output.loss.tolist() == pytest.approx([-1.0, -1.28])


def test_the_divergence_from_the_reference_is_added_with_its_coefficient():
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, kl_coefficient=0.1, kl_estimator="k3")
    output = call(objective, tensor(-1.0), advantages=tensor(1.0), reference_log_probs=tensor(-1.0 + math.log(2)))
    k3 = 2 - 1 - math.log(2)
    assert output.loss.item() == pytest.approx(-1.0 + 0.1 * k3)
    assert output.metrics["kl"].item() == pytest.approx(k3)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("log_ratio", [-0.5, 0.5])
def test_descending_the_loss_with_no_advantage_moves_the_policy_to_the_reference(estimator, log_ratio):
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, kl_coefficient=1.0, kl_estimator=estimator)
    log_probs = tensor(-1.0).requires_grad_()
    call(objective, log_probs, advantages=tensor(0.0), reference_log_probs=tensor(-1.0 + log_ratio)).loss.backward()
    assert math.copysign(1.0, -log_probs.grad.item()) == math.copysign(1.0, log_ratio)


def test_coefficient_zero_needs_no_reference_and_reports_no_divergence():
    assert "kl" not in call(GRPO, tensor(-1.0), advantages=tensor(1.0)).metrics


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="'advantages', found weight"):
        call(GRPO, tensor(-1.0), weight=tensor(1.0))
    with pytest.raises(ValueError, match="'reference_log_probs', found advantages"):
        call(PolicyObjective(0.2, 0.2, kl_coefficient=0.1), tensor(-1.0), advantages=tensor(1.0))


def test_mismatch_compares_the_rollout_with_old_log_probs_and_not_with_new_ones():
    metrics = call(
        GRPO,
        tensor(-9.0, -9.0),
        advantages=tensor(1.0, 1.0),
        old_log_probs=tensor(-1.0, -2.0),
        rollout_log_probs=tensor(-1.0 - math.log(2), -2.0),
    ).metrics
    assert metrics["mismatch_abs"].tolist() == pytest.approx([math.log(2), 0.0])
    assert metrics["mismatch_abs_max"].tolist() == pytest.approx([math.log(2), 0.0])
    assert metrics["mismatch_k3"].tolist() == pytest.approx([2 - 1 - math.log(2), 0.0])  # r = trainer / rollout = 2


def test_metrics_carry_no_gradient_and_have_one_value_per_token():
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, kl_coefficient=0.1)
    fields = {"advantages": tensor(1, -1), "reference_log_probs": tensor(-1, -2), "rollout_log_probs": tensor(-1, -2)}
    output = call(objective, tensor(-1.5, -2.5).requires_grad_(), **fields)
    assert set(output.metrics) == {"ratio", "clip_share", "kl", "mismatch_k3", "mismatch_abs", "mismatch_abs_max"}
    assert all(values.shape == (2,) and not values.requires_grad for values in output.metrics.values())
    assert output.loss.requires_grad


def test_the_supervised_loss_is_cross_entropy():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(2))
    targets = [1, 10, 0, 4, 4]
    output = call(SupervisedObjective(), sampled_log_probs(logits, targets))
    (weight,) = token_mean_weights([5])
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(targets))
    torch.testing.assert_close((output.loss * weight).sum(), expected)


def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches():
    generator = torch.Generator().manual_seed(3)
    counts = [1, 9, 4]
    starts = [0, 1, 10, 14]
    logits = torch.randn(14, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    tokens = torch.randint(6, (14,), generator=generator).tolist()
    fields = {
        "advantages": torch.randn(14, dtype=torch.float64, generator=generator),
        "old_log_probs": sampled_log_probs(logits, tokens).detach() + 0.3 * torch.randn(14, generator=generator),
        "reference_log_probs": torch.full((14,), -1.8, dtype=torch.float64),
        "weight": torch.tensor(token_mean_weights(counts), dtype=torch.float64).repeat_interleave(torch.tensor(counts)),
    }
    objective = PolicyObjective(clip_low=0.2, clip_high=0.28, kl_coefficient=0.05)

    def gradient(micro_batches: list[list[int]]) -> Tensor:
        logits.grad = None
        for members in micro_batches:
            at = [i for sequence in members for i in range(starts[sequence], starts[sequence + 1])]
            log_probs = sampled_log_probs(logits[at], [tokens[i] for i in at])
            here = {name: values[at] for name, values in fields.items()}
            (call(objective, log_probs, **here).loss * here["weight"]).sum().backward()
        return logits.grad.clone()

    whole = gradient([[0, 1, 2]])
    for cut in ([[0], [1], [2]], [[2, 0], [1]], [[1, 2], [], [0]]):
        torch.testing.assert_close(gradient(cut), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("objective", [PolicyObjective(0.2, 0.28, 0.1, "k2"), SupervisedObjective()])
def test_objectives_cross_processes(objective):
    assert pickle.loads(pickle.dumps(objective)) == objective
