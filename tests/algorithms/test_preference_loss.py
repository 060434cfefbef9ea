"""Losses of preference training: values worked out by hand, slow references, gradients, extremes, and what may not
matter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms.preference_loss import (
    PairObjective,
    UnpairedObjective,
    dpo_loss,
    ipo_loss,
    kto_loss,
    log_odds,
    odds_ratio_loss,
    simpo_loss,
)

RATIOS = st.floats(-20, 20, width=32)
MEANS = st.floats(-8, -0.0625, width=32)
LN2, LN3 = math.log(2), math.log(3)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def one(value: float) -> Tensor:
    return torch.tensor([value])


# ---------------------------------------------------------------------- the formulas


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (dpo_loss(one(0.0), one(0.0), beta=0.1), LN2),
        (dpo_loss(one(3.0), one(1.0), beta=0.5), math.log(1 + math.exp(-1))),
        (dpo_loss(one(1.0), one(3.0), beta=0.5), math.log(1 + math.e)),
        # beta * difference = log 3, so that sigmoid is 3/4.
        (dpo_loss(one(LN3), one(0.0), beta=1.0, label_smoothing=0.25), 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
        (ipo_loss(one(2.0), one(-1.0), beta=0.25), (3 - 2) ** 2),
        (ipo_loss(one(0.0), one(0.0), beta=0.1), 25.0),
        (ipo_loss(one(4.0), one(-1.0), beta=0.1), 0.0),
        (simpo_loss(one(-1.0), one(-2.0), beta=2.0, target_margin=2.0), LN2),
        (simpo_loss(one(-1.0), one(-2.0), beta=2.0), math.log(1 + math.exp(-2))),
        (log_odds(one(math.log(1 / 2))), 0.0),
        (log_odds(one(math.log(3 / 4))), math.log(3)),
        # odds 3 and 1 / 3: the ratio is 9.
        (odds_ratio_loss(one(math.log(3 / 4)), one(math.log(1 / 4))), math.log(1 + 1 / 9)),
        (kto_loss(one(2.0), torch.tensor([True]), one(2.0), beta=0.3), 0.5),
        (kto_loss(one(math.log(3)), torch.tensor([True]), one(0.0), beta=1.0), 1 / 4),
        (kto_loss(one(math.log(3)), torch.tensor([False]), one(0.0), beta=1.0), 3 / 4),
        (kto_loss(one(math.log(3)), torch.tensor([False]), one(0.0), beta=1.0, undesirable_weight=2.0), 3 / 2),
        (kto_loss(one(math.log(3)), torch.tensor([True]), one(0.0), beta=1.0, desirable_weight=4.0), 1.0),
    ],
)  # fmt: skip
def test_losses_worked_out_by_hand(found: Tensor, expected: float) -> None:
    assert found.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(chosen=RATIOS, rejected=RATIOS, beta=st.floats(0.01, 1), smoothing=st.floats(0, 0.49))
def test_dpo_and_ipo_are_the_formulas_of_the_papers(
    chosen: float, rejected: float, beta: float, smoothing: float
) -> None:
    difference = beta * (chosen - rejected)
    expected = -(1 - smoothing) * math.log(sigmoid(difference)) - smoothing * math.log(sigmoid(-difference))
    found = dpo_loss(one(chosen), one(rejected), beta=beta, label_smoothing=smoothing).item()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    found = ipo_loss(one(chosen), one(rejected), beta=beta).item()
    assert found == pytest.approx((chosen - rejected - 1 / (2 * beta)) ** 2, rel=1e-4, abs=1e-4)


@given(chosen=MEANS, rejected=MEANS, beta=st.floats(0.5, 3), margin=st.floats(0, 2))
def test_simpo_and_orpo_are_the_formulas_of_the_papers(
    chosen: float, rejected: float, beta: float, margin: float
) -> None:
    found = simpo_loss(one(chosen), one(rejected), beta=beta, target_margin=margin).item()
    assert found == pytest.approx(-math.log(sigmoid(beta * chosen - beta * rejected - margin)), rel=1e-4, abs=1e-6)
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (chosen, rejected)]
    found = odds_ratio_loss(one(chosen), one(rejected)).item()
    assert found == pytest.approx(-math.log(sigmoid(math.log(odds[0] / odds[1]))), rel=1e-4, abs=1e-6)


@given(ratio=RATIOS, point=st.floats(0, 10, width=32), beta=st.floats(0.01, 1), is_desirable=st.booleans())
def test_kto_is_the_formula_of_the_paper(ratio: float, point: float, beta: float, is_desirable: bool) -> None:
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    if is_desirable:
        expected = 1.5 - 1.5 * sigmoid(beta * (ratio - point))
    else:
        expected = 0.5 - 0.5 * sigmoid(beta * (point - ratio))
    found = kto_loss(one(ratio), torch.tensor([is_desirable]), one(point), beta=beta, **weights)
    assert found.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_gradients_are_those_of_the_formulas() -> None:
    def gradient(function: object, *values: float) -> list[float]:
        leaves = [torch.tensor([value], requires_grad=True) for value in values]
        function(*leaves).sum().backward()  # type: ignore[operator]
        return [leaf.grad.item() for leaf in leaves]  # type: ignore[union-attr]

    # DPO, the gradient under equation 7: -beta * sigmoid(reward of the worse - reward of the better) for the better.
    pull = 0.5 * sigmoid(0.5 * (1 - 3))
    assert gradient(lambda c, r: dpo_loss(c, r, beta=0.5), 3.0, 1.0) == pytest.approx([-pull, pull])
    assert gradient(lambda c, r: ipo_loss(c, r, beta=0.25), 3.0, -1.0) == pytest.approx([4.0, -4.0])
    pull = 2 * sigmoid(-(2 * (-1 + 2) - 0.5))
    assert gradient(lambda c, r: simpo_loss(c, r, beta=2.0, target_margin=0.5), -1.0, -2.0) == pytest.approx(
        [-pull, pull]
    )
    # ORPO: d log-odds / d log P = 1 / (1 - P).
    pull = sigmoid(-math.log(9))
    assert gradient(odds_ratio_loss, math.log(3 / 4), math.log(1 / 4)) == pytest.approx([-4 * pull, pull / (1 - 1 / 4)])
    for is_desirable, sign in ((True, -1), (False, 1)):
        found = gradient(lambda x, y=is_desirable: kto_loss(x, torch.tensor([y]), one(1.0), beta=0.5), 2.0)
        assert found == pytest.approx([sign * 0.5 * sigmoid(0.5) * sigmoid(-0.5)])


def test_nothing_is_learned_through_the_reference_point() -> None:
    point = torch.tensor([0.5], requires_grad=True)
    loss = kto_loss(torch.tensor([1.0], requires_grad=True), torch.tensor([True]), point, beta=0.1)
    loss.sum().backward()
    assert point.grad is None


@pytest.mark.parametrize(
    "function",
    [
        lambda c, r: dpo_loss(c, r, beta=10.0, label_smoothing=0.1),
        lambda c, r: ipo_loss(c, r, beta=0.01),
        lambda c, r: simpo_loss(c, r, beta=10.0, target_margin=5.0),
        odds_ratio_loss,
        lambda c, r: kto_loss(c, r < -1, torch.full_like(c, 1e5), beta=10.0),
    ],
    ids=["dpo", "ipo", "simpo", "orpo", "kto"],
)
@pytest.mark.parametrize("chosen", [0.0, -1e-30, -1e-8, -1e5])
@pytest.mark.parametrize("rejected", [0.0, -1e-30, -1e-8, -1e5])
def test_extremes_give_finite_losses_and_gradients(function: object, chosen: float, rejected: float) -> None:
    leaves = [torch.tensor([value], requires_grad=True) for value in (chosen, rejected)]
    loss = function(*leaves)  # type: ignore[operator]
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert all(leaf.grad is None or torch.isfinite(leaf.grad).all() for leaf in leaves)


def test_a_hopeless_pair_still_pulls_with_all_its_strength() -> None:
    chosen = torch.tensor([-1e4], requires_grad=True)
    dpo_loss(chosen, one(0.0), beta=0.1).sum().backward()
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-0.1)


@given(shift=st.floats(-5, 5, width=32))
def test_only_the_difference_of_the_log_ratios_counts(shift: float) -> None:
    chosen, rejected = torch.tensor([0.5, -1.0]), torch.tensor([0.0, 2.0])
    for function in (dpo_loss, ipo_loss):
        moved = function(chosen + shift, rejected + shift, beta=0.2)
        torch.testing.assert_close(moved, function(chosen, rejected, beta=0.2), rtol=1e-4, atol=1e-5)


def test_losses_of_bfloat16_are_computed_in_float32() -> None:
    chosen, rejected = torch.tensor([-1.5], dtype=torch.bfloat16), torch.tensor([-0.25], dtype=torch.bfloat16)
    for found, expected in (
        (ipo_loss(chosen, rejected, beta=0.1), ipo_loss(chosen.float(), rejected.float(), beta=0.1)),
        (odds_ratio_loss(chosen, rejected), odds_ratio_loss(chosen.float(), rejected.float())),
    ):
        assert torch.equal(found, expected)


# ---------------------------------------------------------------------- the objectives


LOG_PROBS = torch.tensor([-1.0, -2.0, -3.0, -0.5, -0.25, -4.0, -1.0, -1.5])
REFERENCE = torch.tensor([-1.5, -1.0, -3.5, -1.5, -0.5, -3.0, -1.0, -0.5])
INDEX = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])  # two pairs: answers of 3 and 2, of 1 and 2 tokens
RATIO = [0.0, 1.25, -1.0, -1.0]
MEAN = [-2.0, -0.375, -4.0, -1.25]


def on_tokens(values: list[float], index: Tensor = INDEX) -> Tensor:
    return torch.tensor(values)[index]


def mean_metrics(output: object) -> dict[str, float]:
    """Metrics as the learner makes them of one micro-batch."""
    return {
        name: metric.compute(**{moment: values.double().mean().item() for moment, values in metric.moments.items()})
        for name, metric in output.derived.items()  # type: ignore[attr-defined]
    }


def learn(objective: object, fields: dict[str, Tensor], index: Tensor = INDEX, log_probs: Tensor = LOG_PROBS):
    return objective({"log_probs": log_probs}, fields, index)  # type: ignore[operator]


PAIR_FIELDS = {"is_chosen": on_tokens([1.0, 0.0, 1.0, 0.0]), "reference_log_probs": REFERENCE}


@pytest.mark.parametrize(
    ("objective", "losses", "rewards"),
    [
        (
            PairObjective(loss="dpo", beta=0.4, label_smoothing=0.1),
            [-0.9 * math.log(sigmoid(0.4 * -1.25)) - 0.1 * math.log(sigmoid(0.4 * 1.25)), LN2],
            [0.4 * ratio for ratio in RATIO],
        ),
        (PairObjective(loss="ipo", beta=0.5), [(-1.25 - 1) ** 2, 1.0], [0.5 * ratio for ratio in RATIO]),
        (
            PairObjective(loss="simpo", beta=2.0, target_margin=0.5),
            [-math.log(sigmoid(2 * (-2 + 0.375) - 0.5)), -math.log(sigmoid(2 * (-4 + 1.25) - 0.5))],
            [2.0 * mean for mean in MEAN],
        ),
        (
            PairObjective(loss="dpo", beta=0.4, sft_coefficient=0.2),
            [-math.log(sigmoid(0.4 * -1.25)) + 0.2 * 2, LN2 + 0.2 * 4],
            [0.4 * ratio for ratio in RATIO],
        ),
    ],
    ids=["cdpo", "ipo", "simpo", "dpo with an SFT term"],
)
def test_the_objective_of_pairs(objective: PairObjective, losses: list[float], rewards: list[float]) -> None:
    output = learn(objective, PAIR_FIELDS)
    assert output.loss.tolist() == pytest.approx([losses[0]] * 5 + [losses[1]] * 3, rel=1e-5)
    metrics = mean_metrics(output)
    differences = [rewards[0] - rewards[1], rewards[2] - rewards[3]]
    assert metrics["accuracy"] == sum({True: 1.0, False: 0.0}[d > 0] if d else 0.5 for d in differences) / 2
    assert metrics["reward_margin"] == pytest.approx(sum(differences) / 2, rel=1e-5)
    assert metrics["chosen_reward"] == pytest.approx((rewards[0] + rewards[2]) / 2, rel=1e-5, abs=1e-7)
    assert metrics["rejected_reward"] == pytest.approx((rewards[1] + rewards[3]) / 2, rel=1e-5)
    assert (metrics["chosen_log_prob"], metrics["rejected_log_prob"]) == (-5.0, -1.625)
    assert ("sft_loss" in metrics) == (objective.sft_coefficient > 0)


def test_orpo_is_an_sft_loss_with_the_odds_ratio_added() -> None:
    output = learn(PairObjective(loss="orpo", beta=0.3), PAIR_FIELDS)
    added = odds_ratio_loss(torch.tensor([-2.0, -4.0]), torch.tensor([-0.375, -1.25]))
    expected = torch.tensor([2.0, 4.0]) + 0.3 * added
    torch.testing.assert_close(output.loss, expected[torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])])
    assert mean_metrics(output)["sft_loss"] == 3.0
    assert mean_metrics(output)["accuracy"] == 0.0


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_a_loss_without_reference_asks_for_none(loss: str) -> None:
    learn(PairObjective(loss=loss, beta=1.0), {"is_chosen": PAIR_FIELDS["is_chosen"]})  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_a_loss_with_reference_says_what_is_missing(loss: str) -> None:
    with pytest.raises(ValueError, match="needs the token field 'reference_log_probs', found is_chosen"):
        learn(PairObjective(loss=loss, beta=1.0), {"is_chosen": PAIR_FIELDS["is_chosen"]})  # type: ignore[arg-type]


@pytest.mark.parametrize("is_chosen", [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
def test_what_is_not_pairs_with_the_better_answer_first_is_refused(is_chosen: list[float]) -> None:
    with pytest.raises(ValueError, match="one of pairs, the better answer first"):
        learn(PairObjective(loss="dpo", beta=1.0), PAIR_FIELDS | {"is_chosen": on_tokens(is_chosen)})


KTO_FIELDS = {
    "is_desirable": on_tokens([1.0, 1.0, 0.0, 1.0]),
    "reference_point": torch.full((8,), 0.25),
    "reference_log_probs": REFERENCE,
}


def test_the_objective_of_single_answers() -> None:
    output = learn(UnpairedObjective(beta=0.4, desirable_weight=1.5, undesirable_weight=0.5), KTO_FIELDS)
    losses = [
        1.5 * sigmoid(0.4 * 0.25), 1.5 * sigmoid(0.4 * (0.25 - 1.25)),
        0.5 * sigmoid(0.4 * (-1 - 0.25)), 1.5 * sigmoid(0.4 * 1.25),
    ]  # fmt: skip
    assert output.loss.tolist() == pytest.approx([losses[index] for index in INDEX.tolist()], rel=1e-5)
    metrics = mean_metrics(output)
    assert metrics["accuracy"] == 0.5 and metrics["kl"] == 0.25
    assert metrics["chosen_reward"] == pytest.approx(0.4 * 0.25 / 3, rel=1e-5)
    assert metrics["rejected_reward"] == pytest.approx(-0.4, rel=1e-5)
    assert metrics["reward_margin"] == pytest.approx(0.4 * 0.25 / 3 + 0.4, rel=1e-5)
    assert metrics["chosen_log_prob"] == pytest.approx((-6 - 0.75 - 2.5) / 3)
    assert metrics["rejected_log_prob"] == -4.0


def test_a_mean_over_no_answer_is_no_number() -> None:
    metrics = mean_metrics(learn(UnpairedObjective(beta=0.4), KTO_FIELDS | {"is_desirable": torch.ones(8)}))
    assert math.isnan(metrics["rejected_reward"]) and math.isnan(metrics["reward_margin"])
    assert metrics["chosen_reward"] == pytest.approx(0.4 * -0.75 / 4, rel=1e-5)


@pytest.mark.parametrize("order", [[1, 0], [0, 1]])
def test_a_step_may_be_cut_and_ordered_in_any_way(order: list[int]) -> None:
    """Loss, gradient and moments of two micro-batches of a pair each add up to those of one with both."""
    whole, parts = LOG_PROBS.clone().requires_grad_(), LOG_PROBS.clone().requires_grad_()
    weights = torch.tensor([1 / (2 * 5)] * 5 + [1 / (2 * 3)] * 3)
    objective = PairObjective(loss="dpo", beta=0.7, sft_coefficient=0.3)
    (learn(objective, PAIR_FIELDS, log_probs=whole).loss * weights).sum().backward()
    total = torch.zeros(())
    for number in order:
        place = slice(0, 5) if number == 0 else slice(5, 8)
        fields = {name: values[place] for name, values in PAIR_FIELDS.items()}
        output = objective({"log_probs": parts[place]}, fields, INDEX[place] - INDEX[place][0])
        total = total + (output.loss * weights[place]).sum()
    total.backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-6, atol=0)


def test_a_bad_number_spoils_its_own_pair_alone() -> None:
    log_probs = LOG_PROBS.clone()
    log_probs[6] = math.nan
    loss = learn(PairObjective(loss="dpo", beta=0.7), PAIR_FIELDS, log_probs=log_probs).loss
    assert torch.isfinite(loss).tolist() == [True] * 5 + [False] * 3
