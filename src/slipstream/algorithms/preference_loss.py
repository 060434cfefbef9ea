"""What preference training minimizes: losses of whole answers, from the log-probs a policy gives their tokens.

Every loss is one of an implicit reward, a number that stands for how good the policy itself finds an answer. DPO,
SimPO and ORPO put it into the Bradley-Terry loss of a reward model; IPO wants a fixed difference; KTO looks at one
answer at a time. `sum` below is the log-prob of an answer, the sum over its tokens; `mean` is that divided by their
number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from slipstream.algorithms.objective import DerivedMetric, ObjectiveOutput, required_field
from slipstream.algorithms.reward_model_loss import bradley_terry_loss

PairLossName = Literal["dpo", "ipo", "simpo", "orpo"]
REFERENCE_LOSSES = ("dpo", "ipo", "kto")
"""Losses that compare the policy with a reference."""

SMALLEST_DISTANCE = 2.0**-23
"""Of the mean log-prob of an answer from 0: float32 tells probabilities near 1 apart no better, and at 1 the odds are
infinite."""


def dpo_loss(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each pair from the log-ratios sum(policy) - sum(reference) of its answers. All [P], float32.

    -log sigmoid(beta * (chosen - rejected)): DPO (arXiv 2305.18290), equation 7. `label_smoothing` is the probability
    that a pair is the wrong way round; the loss is then its expectation over both ways: conservative DPO (E. Mitchell,
    "A note on DPO with noisy preferences & relationship to IPO", 2023).
    """
    return bradley_terry_loss(
        beta * chosen_ratio.float(), beta * rejected_ratio.float(), label_smoothing=label_smoothing
    )


def ipo_loss(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """Return the loss of each pair from the log-ratios sum(policy) - sum(reference) of its answers. All [P], float32.

    (chosen - rejected - 1 / (2 * beta))^2: IPO (arXiv 2310.12036), equation 17, whose tau is `beta`. The sums are not
    divided by lengths, as they are not there.
    """
    return (chosen_ratio.float() - rejected_ratio.float() - 1 / (2 * beta)).square()


def simpo_loss(chosen_mean: Tensor, rejected_mean: Tensor, *, beta: float, target_margin: float = 0.0) -> Tensor:
    """Return the loss of each pair from the mean log-probs of its answers. All [P], float32.

    -log sigmoid(beta * chosen - beta * rejected - target_margin): SimPO (arXiv 2405.14734), equation 6.
    """
    return bradley_terry_loss(beta * chosen_mean.float(), beta * rejected_mean.float(), margin=target_margin)


def log_odds(mean_log_prob: Tensor) -> Tensor:
    """Return log(P / (1 - P)) with P the geometric mean of the probabilities of an answer's tokens. Any shape, float32.

    ORPO (arXiv 2403.07691), equations 3 and 4. Finite everywhere, see `SMALLEST_DISTANCE`.
    """
    bounded = mean_log_prob.float().clamp(max=-SMALLEST_DISTANCE)
    # expm1 keeps what 1 - exp(x) would lose where P is nearly 1.
    return bounded - torch.log(-torch.expm1(bounded))


def odds_ratio_loss(chosen_mean: Tensor, rejected_mean: Tensor) -> Tensor:
    """Return the loss of each pair from the mean log-probs of its answers. All [P], float32.

    -log sigmoid(log(odds(chosen) / odds(rejected))): ORPO (arXiv 2403.07691), equation 7.
    """
    return bradley_terry_loss(log_odds(chosen_mean), log_odds(rejected_mean))


def kto_loss(
    log_ratio: Tensor,
    is_desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the loss of each answer from its log-ratio sum(policy) - sum(reference). All [S], float32.

    weight * (1 - sigmoid(beta * (log_ratio - reference_point))) for a desirable answer, with the sign of the difference
    turned for an undesirable one: the loss of KTO (arXiv 2402.01306), lambda_y - v(x, y), written out. `is_desirable`
    is bool; `reference_point` is the z_0 of the paper, without gradient.
    """
    advantage = beta * (log_ratio.float() - reference_point.float().detach())
    # 1 - sigmoid(x) = sigmoid(-x), which keeps what is small.
    return torch.where(
        is_desirable,
        desirable_weight * torch.sigmoid(-advantage),
        undesirable_weight * torch.sigmoid(advantage),
    )


@dataclass(frozen=True)
class PairObjective:
    """The loss of pairs of answers. A step is given whole pairs, the better answer first; loss tokens are the answers.

    All tokens of a pair get the pair's loss, so that weights of 1 / (pairs * tokens of the pair) make it a mean over
    the pairs of the step. `sft_coefficient` times -mean(chosen) is added, as in arXiv 2404.19733. ORPO has that term by
    its definition: -mean(chosen) + beta * `odds_ratio_loss`, equation 6 of its paper with lambda as `beta`.

    Outputs read: `log_probs`. Fields read: `is_chosen`, 1 for the better answer of a pair and 0 for the worse one, and
    `reference_log_probs` for dpo and ipo.

    Metrics, all means over pairs: `accuracy`, the share of pairs whose better answer has the higher implicit reward (a
    tie is half); `reward_margin`, by how much; `chosen_reward` and `rejected_reward`: beta * log-ratio (dpo, ipo),
    beta * mean (simpo), log-odds (orpo); `chosen_log_prob` and `rejected_log_prob`, the sums; with an SFT term
    `sft_loss`.
    """

    loss: PairLossName
    beta: float
    label_smoothing: float = 0.0
    target_margin: float = 0.0
    sft_coefficient: float = 0.0

    needs_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Raises ValueError where the answers are not pairs in their order."""
        log_probs, answers = outputs["log_probs"], _Answers(sequence_index)
        is_chosen = answers.first_of(required_field(fields, "is_chosen"))
        _require_pairs(is_chosen)
        sums = answers.sums(log_probs)
        means = sums / answers.lengths
        compared = means
        if self.loss in REFERENCE_LOSSES:
            compared = answers.sums(log_probs - required_field(fields, "reference_log_probs"))
        loss = self._preference_loss(*_paired(compared))
        sft_loss, _ = _paired(-means)
        sft_coefficient = 1.0 if self.loss == "orpo" else self.sft_coefficient
        if sft_coefficient:
            loss = loss + sft_coefficient * sft_loss
        chosen, rejected = _paired(self._implicit_rewards(compared.detach()))
        chosen_sum, rejected_sum = _paired(sums.detach())
        metrics = {
            "accuracy": (torch.sign(chosen - rejected) + 1) / 2,
            "reward_margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_log_prob": chosen_sum,
            "rejected_log_prob": rejected_sum,
        }
        if sft_coefficient:
            metrics["sft_loss"] = sft_loss.detach()
        return ObjectiveOutput(
            _of_both(loss)[sequence_index],
            derived={name: answers.mean(_of_both(values), is_chosen.bool()) for name, values in metrics.items()},
        )

    def _preference_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The loss of each pair without its SFT term, [P], from what is compared: log-ratios or mean log-probs."""
        match self.loss:
            case "dpo":
                return dpo_loss(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)
            case "ipo":
                return ipo_loss(chosen, rejected, beta=self.beta)
            case "simpo":
                return simpo_loss(chosen, rejected, beta=self.beta, target_margin=self.target_margin)
            case "orpo":
                return self.beta * odds_ratio_loss(chosen, rejected)

    def _implicit_rewards(self, compared: Tensor) -> Tensor:
        return log_odds(compared) if self.loss == "orpo" else self.beta * compared


@dataclass(frozen=True)
class UnpairedObjective:
    """The loss of single answers, each desirable or undesirable: KTO. Loss tokens are the answers.

    All tokens of an answer get its loss, so that weights of 1 / (answers * tokens of the answer) make it a mean over
    the answers of the step. The reference point is a number of the whole step and comes as a field: how a step is cut
    cannot change it.

    Outputs read: `log_probs`. Fields read: `reference_log_probs`; `is_desirable`, 1 or 0; `reference_point`, the KL of
    the policy from the reference, measured on answers to other prompts.

    Metrics: `accuracy`, the share of answers on the right side of the reference point (on it is half); `kl`, the
    reference point; `chosen_reward` and `rejected_reward`, the mean of beta * log-ratio over desirable and undesirable
    answers, and `reward_margin`, their difference; `chosen_log_prob` and `rejected_log_prob`, the means of the sums. A
    mean over no answer is NaN.
    """

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    needs_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Raises ValueError if a field is missing."""
        log_probs, answers = outputs["log_probs"], _Answers(sequence_index)
        is_desirable = answers.first_of(required_field(fields, "is_desirable")).bool()
        reference_point = answers.first_of(required_field(fields, "reference_point"))
        ratios = answers.sums(log_probs - required_field(fields, "reference_log_probs"))
        loss = kto_loss(
            ratios,
            is_desirable,
            reference_point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        distance = ratios.detach() - reference_point
        rewards, sums = self.beta * ratios.detach(), answers.sums(log_probs.detach())
        everywhere = torch.ones_like(is_desirable)
        direction = torch.where(is_desirable, 1.0, -1.0)
        derived = {
            "accuracy": answers.mean((torch.sign(distance) * direction + 1) / 2, everywhere),
            "kl": answers.mean(reference_point, everywhere),
        }
        for name, group in (("chosen", is_desirable), ("rejected", ~is_desirable)):
            derived[f"{name}_reward"] = answers.mean(rewards, group)
            derived[f"{name}_log_prob"] = answers.mean(sums, group)
        moments = {
            f"{name}_{moment}": values
            for name in ("chosen", "rejected")
            for moment, values in derived[f"{name}_reward"].moments.items()
        }
        derived["reward_margin"] = DerivedMetric(difference_of_means, moments)
        return ObjectiveOutput(loss[sequence_index], derived=derived)


def mean_over_answers(total: float, count: float) -> float:
    """From sums over answers, both divided by the same number; NaN where there is no answer."""
    return total / count if count else math.nan


def difference_of_means(
    chosen_total: float, chosen_count: float, rejected_total: float, rejected_count: float
) -> float:
    """From two times what `mean_over_answers` takes; NaN where there is no answer of either kind."""
    return mean_over_answers(chosen_total, chosen_count) - mean_over_answers(rejected_total, rejected_count)


class _Answers:
    """The answers of a micro-batch, S of them with N tokens; each has at least one token."""

    def __init__(self, sequence_index: Tensor) -> None:
        """`sequence_index` [N] says which answer a token belongs to; it never falls."""
        self._index = sequence_index
        self.lengths = torch.bincount(sequence_index)
        self._starts = torch.cumsum(self.lengths, dim=0) - self.lengths

    def first_of(self, values: Tensor) -> Tensor:
        """The value at the first token of each answer: [N] -> [S]."""
        return values[self._starts]

    def sums(self, values: Tensor) -> Tensor:
        """[N] -> [S] float32, with gradient. Added up in float64, so that the order of additions does not show."""
        totals = torch.zeros(len(self.lengths), dtype=torch.float64, device=values.device)
        return totals.index_add(0, self._index, values.double()).float()

    def mean(self, values: Tensor, counted: Tensor) -> DerivedMetric:
        """The mean of `values` [S] over the answers of the step that are `counted` [S] bool.

        Metrics are averaged over tokens: the value of an answer stands at its first token and 0 at the others, and so
        does the 1 that counts it.
        """
        moments = {}
        for name, per_answer in (("total", values.double()), ("count", torch.ones_like(values, dtype=torch.float64))):
            moments[name] = torch.zeros(len(self._index), dtype=torch.float64, device=values.device)
            moments[name][self._starts] = torch.where(counted, per_answer, 0.0)
        return DerivedMetric(mean_over_answers, moments)


def _paired(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of better and worse answers by turns, [2 P], the better and the worse, [P] each."""
    chosen, rejected = values.view(-1, 2).unbind(dim=1)
    return chosen, rejected


def _of_both(values: Tensor) -> Tensor:
    """Of pairs, [P], the same for both answers, [2 P]."""
    return values.repeat_interleave(2)


def _require_pairs(is_chosen: Tensor) -> None:
    expected = torch.tensor([1.0, 0.0], device=is_chosen.device).repeat(len(is_chosen) // 2)
    if len(is_chosen) % 2 or not torch.equal(is_chosen, expected):
        raise ValueError(f"this loss is one of pairs, the better answer first, found is_chosen {is_chosen.tolist()}")
