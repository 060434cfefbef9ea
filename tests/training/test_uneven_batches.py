"""Batches that do not divide among ranks never hang: three rows on two ranks, one row on two, one row far too long.

Whatever is learned, every rank takes part in the same collectives. The batches are cut as in a run, by `LearnerGroup`,
and computed by two ranks in processes of their own. Their start is what takes time, so one pair of them has all cases.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.algorithms.objective import Objective, PolicyObjective, SupervisedObjective
from slipstream.algorithms.preference_loss import PairObjective, UnpairedObjective
from slipstream.algorithms.reward_model_loss import RewardModelObjective
from slipstream.algorithms.step_loss import StepObjective
from slipstream.algorithms.value_loss import ValueObjective
from slipstream.data.preferences import PreferencePair, answer_examples, pair_examples
from slipstream.data.steps import LabelledSteps, step_example
from slipstream.data.trajectory import TrainingExample
from slipstream.training import group as group_module
from slipstream.training.group import LearnerGroup

# A rank that waits for another in vain says so after a minute (`timeout_s` of `make_spec`).
TIMEOUT_S = 240
# The longest row has a micro-batch of its own, the others share one: one rank has more of them than the other.
LENGTHS = (4, 40, 6)
TOKENS_PER_MICRO_BATCH = 16
RANKS = 2
# Without partitions, and where every forward pass gathers weights from all ranks.
STAGES = (1, 3)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


@dataclass(frozen=True)
class Case:
    """What a workflow learns from three rows; each of them is so many examples."""

    role: str
    objective: Objective
    examples: list[TrainingExample]
    examples_per_row: int = 1


def weighted(examples: list[TrainingExample], **fields: float) -> list[TrainingExample]:
    total = sum(int(example.loss_mask.sum()) for example in examples)

    def field(example: TrainingExample, value: float) -> np.ndarray:
        return np.full(len(example.tokens), value, dtype=np.float32)

    added = {"weight": 1 / total, **fields}
    return [
        replace(
            example,
            token_fields=example.token_fields | {name: field(example, value) for name, value in added.items()},
        )
        for example in examples
    ]


def make_pair(row: int, length: int, generator: np.random.Generator) -> PreferencePair:
    answers = [generator.integers(1, 60, size) for size in (length, length + 2)]
    return PreferencePair(str(row), *answers, *(np.arange(len(answer)) >= 2 for answer in answers))


def make_cases() -> dict[str, Case]:
    generator = np.random.default_rng(0)
    rows = [
        TrainingExample(str(row), generator.integers(1, 60, length), np.arange(length) >= 2)
        for row, length in enumerate(LENGTHS)
    ]
    pairs = [make_pair(row, length, generator) for row, length in enumerate(LENGTHS)]
    answers = [example for pair in pairs for example in answer_examples(pair)]
    steps = [
        LabelledSteps(str(row), generator.integers(1, 60, length), np.array([2, length - 1]), np.float32([1.0, 0.0]))
        for row, length in enumerate(LENGTHS)
    ]
    policy, critic = PolicyObjective(clip_low=0.2, clip_high=0.2), ValueObjective(value_clip=0.2)
    kto = [replace(each, token_fields={"is_desirable": each.token_fields["is_chosen"]}) for each in answers[::2]]
    return {
        "sft": Case("policy", SupervisedObjective(), weighted(rows)),
        "rl": Case("policy", policy, weighted(rows, advantages=0.5)),
        "rl critic": Case("critic", critic, weighted(rows, returns=0.5, old_values=0.1)),
        "preference": Case("policy", PairObjective("simpo", beta=0.3), weighted(answers), 2),
        "preference kto": Case(
            "policy", UnpairedObjective(beta=0.3), weighted(kto, reference_log_probs=-4.0, reference_point=0.2)
        ),
        "reward model": Case("reward_model", RewardModelObjective(), weighted(pair_examples(pairs)), 2),
        "process reward model": Case(
            "process_reward_model", StepObjective(), weighted([step_example(answer) for answer in steps])
        ),
    }


class Recorder:
    """Stands for a remote rank, and notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []

    def submit(self, method: str, *arguments: Any) -> dict[str, Any]:
        self.calls.append((method, method, arguments))
        return {"skipped": 0.0}


def calls_of(case: Case) -> list[list[tuple[str, str, tuple[Any, ...]]]]:
    """What each rank is asked for in a step of three rows, and in a measurement of one row."""
    ranks = [Recorder() for _ in range(RANKS)]
    learner = LearnerGroup(
        ranks,  # type: ignore[arg-type]
        tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH,
        call_timeout_s=1.0,
        examples_per_unit=case.examples_per_row,
    )
    learner.update([case.examples], case.objective)
    learner.loss(case.examples[: case.examples_per_row], case.objective)
    return [rank.calls for rank in ranks]


@pytest.fixture(scope="module")
def answers(model_folder: Path, helpers: Any, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Of each rank: the answers of each case at each stage."""
    folder = tmp_path_factory.mktemp("uneven")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "gather", lambda calls, deadline_s: list(calls))
        calls = {name: calls_of(case) for name, case in make_cases().items()}
    jobs: list[list[Any]] = [[] for _ in range(RANKS)]
    for name, case in make_cases().items():
        for stage in STAGES:
            for rank in range(RANKS):
                changes = {"rank": rank, "data_parallel": RANKS, "role": case.role}
                spec = helpers.make_spec(model_folder, training={"zero_stage": stage}, **changes)
                jobs[rank].append((spec, calls[name][rank]))
    return helpers.run_ranks(jobs, folder, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", make_cases())
def test_three_rows_on_two_ranks_are_learned_from_and_one_row_is_measured(
    name: str, answers: list[list[dict[str, Any]]]
) -> None:
    place, case = list(make_cases()).index(name) * len(STAGES), make_cases()[name]
    rows = {"update": case.examples, "loss": case.examples[: case.examples_per_row]}
    for stage in range(len(STAGES)):
        first, second = (rank[place + stage] for rank in answers)
        assert "error" not in first, first["error"]
        for method, examples in rows.items():
            assert first[method]["tokens"] == sum(int(example.loss_mask.sum()) for example in examples)
            assert np.isfinite(first[method]["loss"])
            # As text: KTO has no number for a kind of answer that there is none of.
            assert str({**second[method], "seconds": 0}) == str({**first[method], "seconds": 0})
