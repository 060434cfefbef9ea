"""Objectives: what the learner minimizes, on a tiny policy whose gradients can be written down."""

import itertools
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.algorithms.aggregation import Aggregation, aggregation_weights
from slipstream.algorithms.correction import Correction
from slipstream.algorithms.objective import ObjectiveOutput, PolicyObjective, SupervisedObjective
from slipstream.algorithms.policy_loss import POLICY_LOSSES, PolicyLossInput
from slipstream.errors import TrainingError

GRPO = PolicyObjective(clip_low=0.2, clip_high=0.28)
TRUNCATE = Correction(mode="truncate", level="token", low=0.0, high=2.0)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def call(objective, log_probs: Tensor, entropy: Tensor | None = None, index: Sequence[int] | None = None, **fields):
    """What an objective makes of tokens of one sequence, or of those that `index` says."""
    outputs = {"log_probs": log_probs, "entropy": torch.zeros_like(log_probs) if entropy is None else entropy}
    return objective(outputs, fields, torch.tensor(index or [0] * len(log_probs), dtype=torch.int64))


def plain_loss(inputs: PolicyLossInput) -> Tensor:
    """A user's loss: REINFORCE with the ratio as a weight."""
    return -(inputs.log_probs.detach() - inputs.old_log_probs).exp() * inputs.advantages * inputs.log_probs


def derived(output: ObjectiveOutput, name: str) -> float:
    metric = output.derived[name]
    return metric.compute(**{moment: values.double().mean().item() for moment, values in metric.moments.items()})


def sampled_log_probs(logits: Tensor, tokens: list[int], temperature: float = 1.0) -> Tensor:
    return (logits / temperature).log_softmax(-1)[torch.arange(len(tokens)), tokens]


@pytest.mark.parametrize("policy_loss", [*POLICY_LOSSES, plain_loss])
def test_the_first_on_policy_step_has_ratio_one_and_the_gradient_of_reinforce(policy_loss):
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    log_probs = sampled_log_probs(logits, [3, 0, 6, 2])
    advantages = tensor(1.5, 1.5, 1.5, -0.7)
    weight = tensor(*aggregation_weights([3, 1], aggregation="sequence_mean_token_mean"))[[0, 0, 0, 1]]

    output = call(replace(GRPO, policy_loss=policy_loss), log_probs, index=[0, 0, 0, 1], advantages=advantages)
    (gradient,) = torch.autograd.grad((output.loss * weight).sum(), logits, retain_graph=True)
    (reinforce,) = torch.autograd.grad(-(weight * advantages * log_probs).sum(), logits)

    torch.testing.assert_close(gradient, reinforce)
    assert output.metrics["ratio"].tolist() == [1.0] * 4
    assert output.metrics.get("clip_share", torch.zeros(4)).tolist() == [0.0] * 4


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


def test_a_reference_whose_divergence_is_in_the_reward_is_reported_and_not_in_the_loss():
    output = call(
        replace(GRPO, kl_estimator="k1"), tensor(-1.0), advantages=tensor(1.0), reference_log_probs=tensor(-1.5)
    )
    assert output.metrics["kl"].tolist() == [0.5]
    assert output.loss.tolist() == [-1.0]


def test_the_unbiased_divergence_is_weighted_with_the_ratio():
    objective = replace(GRPO, kl_coefficient=0.1, kl_estimator="unbiased")
    fields = {"old_log_probs": tensor(-2.0), "reference_log_probs": tensor(-1.0 + math.log(2))}
    output = call(objective, tensor(-1.0), advantages=tensor(0.0), **fields)
    assert output.metrics["kl"].item() == pytest.approx(math.e * (2 - 1 - math.log(2)))
    assert output.loss.item() == pytest.approx(0.1 * output.metrics["kl"].item())


def test_the_entropy_bonus_lowers_the_loss_and_its_gradient_raises_the_entropy():
    objective = replace(GRPO, entropy_coefficient=0.1)
    entropy = tensor(0.5, 2.0).requires_grad_()
    output = call(objective, tensor(-1.0, -1.0).requires_grad_(), entropy, advantages=tensor(0.0, 1.0))
    assert output.loss.tolist() == pytest.approx([-0.05, -1.2])
    assert torch.autograd.grad(output.loss.sum(), entropy)[0].tolist() == pytest.approx([-0.1, -0.1])
    assert objective.needs_entropy_gradient and not GRPO.needs_entropy_gradient


def test_an_entropy_bonus_that_would_do_nothing_is_refused():
    objective = replace(GRPO, entropy_coefficient=0.1)
    with pytest.raises(ValueError, match="entropy with a gradient, found a detached one"):
        call(objective, tensor(-1.0).requires_grad_(), advantages=tensor(0.0))


def test_the_correction_multiplies_the_whole_loss_of_a_token():
    objective = replace(GRPO, kl_coefficient=0.1, correction=TRUNCATE)
    fields = {"advantages": tensor(1.0, 1.0, 1.0), "reference_log_probs": tensor(-1.5, -1.0, -0.8)}
    log_probs, ratios = tensor(-1.0, -1.0, -1.0), tensor(0.5, 1.0, 4.0)
    plain = call(replace(objective, correction=None), log_probs, **fields)
    output = call(objective, log_probs, **fields, rollout_log_probs=log_probs - ratios.log())
    weights = tensor(0.5, 1.0, 2.0)
    torch.testing.assert_close(output.loss, weights * plain.loss)
    torch.testing.assert_close(output.metrics["correction_weight"], weights)
    assert output.metrics["correction_cut_share"].tolist() == [0.0, 0.0, 1.0]
    assert derived(output, "correction_effective_share") == pytest.approx(3.5**2 / (0.25 + 1 + 4) / 3)


def test_a_masked_token_contributes_nothing():
    mask = Correction(mode="mask", level="token", low=0.5, high=2.0)
    objective = replace(GRPO, policy_loss="policy_gradient", kl_coefficient=1.0, correction=mask)
    log_probs = tensor(-1.0, -400.0).requires_grad_()
    fields = {"advantages": tensor(1.0, 1e30), "reference_log_probs": tensor(-1.0, 500.0)}
    output = call(objective, log_probs, **fields, rollout_log_probs=tensor(-1.0, -1.0))
    assert output.loss.tolist() == [1.0, 0.0]
    assert torch.autograd.grad(output.loss.sum(), log_probs)[0].tolist() == [-1.0, 0.0]


def test_the_correction_compares_old_log_probs_with_the_rollout_and_not_new_ones():
    fields = {"old_log_probs": tensor(-1.0), "rollout_log_probs": tensor(-1.0), "advantages": tensor(1.0)}
    output = call(replace(GRPO, correction=TRUNCATE), tensor(-5.0), **fields)
    assert output.metrics["correction_weight"].tolist() == [1.0]


def test_a_loss_of_the_users_gets_all_it_needs_and_reports_no_clipping():
    seen = []

    def loss(inputs: PolicyLossInput) -> Tensor:
        seen.append(inputs)
        return plain_loss(inputs)

    log_probs = tensor(-1.0, -2.0).requires_grad_()
    output = call(replace(GRPO, policy_loss=loss), log_probs, index=[0, 1], advantages=tensor(1.0, -1.0))
    assert output.loss.tolist() == [1.0, -2.0]
    assert "clip_share" not in output.metrics
    assert seen[0].sequence_index.tolist() == [0, 1]
    assert not seen[0].old_log_probs.requires_grad and not seen[0].advantages.requires_grad


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda inputs: inputs.log_probs.sum(), r"of shape \[2\], one loss a token; it returned shape \[\] of"),
        (lambda inputs: inputs.log_probs[None], r"it returned shape \[1, 2\]"),
        (lambda inputs: inputs.log_probs > 0, r"it returned shape \[2\] of torch.bool"),
        (lambda inputs: None, "it returned a NoneType"),
        (lambda inputs: -inputs.log_probs.detach(), "without gradient: use log_probs undetached"),
    ],
)
def test_a_function_that_returns_no_loss_is_told_what_one_is(loss, message):
    with pytest.raises(TrainingError, match=f"lambda.*{message}"):
        call(replace(GRPO, policy_loss=loss), tensor(-1.0, -2.0).requires_grad_(), advantages=tensor(1.0, 1.0))


def test_settings_that_no_loss_looks_at_are_refused():
    with pytest.raises(ValueError, match="clip, sequence_clip, cispo, policy_gradient or a function, found 'ppo'"):
        replace(GRPO, policy_loss="ppo")
    with pytest.raises(ValueError, match="dual_clip belongs to policy_loss 'clip', found policy_loss 'cispo'"):
        replace(GRPO, policy_loss="cispo", dual_clip=3.0)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="'advantages', found weight"):
        call(GRPO, tensor(-1.0), weight=tensor(1.0))
    with pytest.raises(ValueError, match="'reference_log_probs', found advantages"):
        call(replace(GRPO, kl_coefficient=0.1), tensor(-1.0), advantages=tensor(1.0))
    with pytest.raises(ValueError, match="'rollout_log_probs', found advantages"):
        call(replace(GRPO, correction=TRUNCATE), tensor(-1.0), advantages=tensor(1.0))


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
    (weight,) = aggregation_weights([5], aggregation="token_mean")
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(targets))
    torch.testing.assert_close((output.loss * weight).sum(), expected)


class Step:
    """Three sequences of one optimizer step, off-policy in every way, of a tiny policy."""

    counts = (1, 9, 4)

    def __init__(self, aggregation: Aggregation = "token_mean") -> None:
        generator = torch.Generator().manual_seed(3)
        count = sum(self.counts)
        self.sequences = torch.arange(3).repeat_interleave(torch.tensor(self.counts))
        self.logits = torch.randn(count, 6, dtype=torch.float64, generator=generator, requires_grad=True)
        self.tokens = torch.randint(6, (count,), generator=generator)
        sampled = sampled_log_probs(self.logits, self.tokens.tolist()).detach()

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(count, dtype=torch.float64, generator=generator)

        weights = aggregation_weights(self.counts, aggregation=aggregation, constant_length=12)
        old_log_probs = sampled + noise(0.3)
        self.fields = {
            "advantages": noise(1.0),
            "old_log_probs": old_log_probs,
            "rollout_log_probs": old_log_probs + noise(0.4),
            "reference_log_probs": torch.full((count,), -1.8, dtype=torch.float64),
            "weight": tensor(*weights)[self.sequences],
        }

    def run(self, objective, micro_batches: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Loss and gradient of the step, computed in these micro-batches of sequences, each in its order."""
        self.logits.grad = None
        loss = tensor(0.0).sum()
        for members in micro_batches:
            at = [i for sequence in members for i in (self.sequences == sequence).nonzero().flatten().tolist()]
            index = [members.index(sequence) for sequence in self.sequences[at].tolist()]
            distribution = self.logits[at].log_softmax(-1)
            log_probs = distribution[torch.arange(len(at)), self.tokens[at]]
            entropy = -(distribution.exp() * distribution).sum(-1)
            here = {name: values[at] for name, values in self.fields.items()}
            part = (call(objective, log_probs, entropy, index, **here).loss * here["weight"]).sum()
            part.backward()
            loss += part.detach()
        return loss, self.logits.grad.clone()


CORRECTIONS = [
    None,
    *(
        Correction(mode=mode, level=level, low=0.6, high=1.5)
        for mode in ("truncate", "mask")
        for level in ("token", "sequence")
    ),
]


@pytest.mark.parametrize("policy_loss", [*POLICY_LOSSES, plain_loss])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_step_does_not_depend_on_how_it_is_cut_and_ordered(policy_loss, correction):
    objective = PolicyObjective(
        clip_low=0.1,
        clip_high=0.15,
        policy_loss=policy_loss,
        correction=correction,
        kl_coefficient=0.05,
        kl_estimator="unbiased",
        entropy_coefficient=0.01,
    )
    for aggregation in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"):
        step = Step(aggregation)
        loss, gradient = step.run(objective, [[0, 1, 2]])
        assert gradient.abs().max() > 1e-4
        for cut in ([[0], [1], [2]], [[2, 0], [1]], [[1, 2], [], [0]], [[2, 1, 0]]):
            found_loss, found_gradient = step.run(objective, cut)
            torch.testing.assert_close(found_loss, loss, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found_gradient, gradient, rtol=1e-10, atol=1e-12)


def test_every_setting_changes_the_gradient():
    plain = PolicyObjective(clip_low=0.1, clip_high=0.15)
    variants = [
        replace(plain, clip_low=0.4),
        replace(plain, clip_high=0.5),
        replace(plain, dual_clip=1.05),
        replace(plain, entropy_coefficient=0.01),
        *(replace(plain, kl_coefficient=0.1, kl_estimator=name) for name in ("k1", "k2", "k3", "unbiased")),
        *(replace(plain, policy_loss=policy_loss) for policy_loss in (*POLICY_LOSSES[1:], plain_loss)),
        *(replace(plain, correction=correction) for correction in CORRECTIONS[1:]),
    ]
    gradients = [Step().run(objective, [[0, 1, 2]])[1] for objective in (plain, *variants)]
    for (i, one), (j, other) in itertools.combinations(enumerate(gradients), 2):
        assert not torch.allclose(one, other), f"{i} and {j} are the same"


@pytest.mark.parametrize("policy_loss", [*POLICY_LOSSES, plain_loss])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("spoiled", ["advantages", "old_log_probs", "rollout_log_probs", "reference_log_probs"])
def test_a_nan_touches_no_other_sequence(policy_loss, correction, spoiled):
    step = Step()
    objective = replace(GRPO, policy_loss=policy_loss, correction=correction, kl_coefficient=0.1)
    _, clean = step.run(objective, [[0, 1, 2]])
    step.fields[spoiled][3] = math.nan  # in sequence 1
    _, gradient = step.run(objective, [[0, 1, 2]])
    elsewhere = step.sequences != 1
    torch.testing.assert_close(gradient[elsewhere], clean[elsewhere])


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("distance", [-1e3, 1e3])
def test_extreme_log_ratios_of_every_kind_stay_finite_in_float32(policy_loss, correction, distance):
    objective = replace(
        GRPO, policy_loss=policy_loss, correction=correction, kl_coefficient=0.1, kl_estimator="unbiased"
    )
    here = torch.full((2,), -1.0)
    for moved in itertools.product([0.0, distance], repeat=3):
        log_probs = here.clone().requires_grad_()
        names = ("old_log_probs", "rollout_log_probs", "reference_log_probs")
        fields = {name: here + distance_of for name, distance_of in zip(names, moved, strict=True)}
        output = call(objective, log_probs, advantages=torch.tensor([1.0, -1.0]), **fields)
        output.loss.sum().backward()
        assert torch.isfinite(output.loss).all() and torch.isfinite(log_probs.grad).all()
        assert all(torch.isfinite(values).all() for values in output.metrics.values())


@pytest.mark.parametrize(
    "objective",
    [
        PolicyObjective(clip_low=0.2, clip_high=0.28, kl_coefficient=0.1, kl_estimator="k2", correction=TRUNCATE),
        PolicyObjective(clip_low=0.2, clip_high=0.28, policy_loss=plain_loss),
        SupervisedObjective(),
    ],
)
def test_objectives_cross_processes(objective):
    assert pickle.loads(pickle.dumps(objective)) == objective
