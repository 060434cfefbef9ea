"""Two learner ranks, in processes of their own, compute what one rank computes.

Starting processes is the slow part, so one pair runs a whole story at every ZeRO stage, first as policy and then as
critic, and the tests look at its parts; a second pair goes on from the checkpoints of the first.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slipstream.algorithms.aggregation import aggregation_weights
from slipstream.algorithms.objective import PolicyObjective
from slipstream.algorithms.reward_model_loss import RewardModelObjective
from slipstream.algorithms.value_loss import ValueObjective
from slipstream.data.preferences import PreferencePair, pair_examples
from slipstream.errors import RunDirectoryError, TrainingError
from slipstream.training.process_group import open_listener
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import ChannelAddress

PROGRAM = Path(__file__).with_name("rank_program.py")
POLICY = PolicyObjective(clip_low=0.2, clip_high=0.2)
VALUE = ValueObjective(value_clip=0.2)
STAGES = (0, 1, 2, 3)
TIMEOUT_S = 270
# Small chunks: the two ranks need different numbers of them.
SETTINGS = {"logits_chunk_tokens": 4, "gradient_clip": 0.5}
PROBE = np.arange(1, 6)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


def free_port() -> int:
    """A port that was free a moment ago: the ranks are processes of their own, so rank 0 cannot open it before."""
    with open_listener("127.0.0.1") as listener:
        return int(listener.getsockname()[1])


def run_ranks(jobs: list[list], folder: Path) -> list[list[dict[str, Any]]]:
    """Run one job per rank, each in a process, all at the same time; returns their results."""
    processes, meeting_point = [], ("127.0.0.1", free_port())
    try:
        for rank, job in enumerate(jobs):
            job_file, result_file = folder / f"job_{rank}.pickle", folder / f"result_{rank}.pickle"
            job_file.write_bytes(pickle.dumps((meeting_point, job)))
            command = [sys.executable, str(PROGRAM), str(job_file), str(result_file)]
            processes.append((subprocess.Popen(command, stderr=subprocess.PIPE, text=True), result_file))
        results = []
        for process, result_file in processes:
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors[-3000:]
            results.append(pickle.loads(result_file.read_bytes()))
        return results
    finally:
        for process, _ in processes:
            process.kill()


class Story:
    """What two ranks do at every stage, and the examples they do it with."""

    def __init__(self, make_examples: Callable, make_value_examples: Callable, folder: Path) -> None:
        self.folder = folder
        # Three examples on two ranks, so that one of them runs a zero-weight micro-batch; then five, cut unevenly.
        self.three, self.five = make_examples((5, 9, 14)), make_examples(seed=3)
        fields = {**self.five[2].token_fields, "advantages": np.full(9, np.nan, np.float32)}
        poisoned = replace(self.five[2], token_fields=fields)
        first, second = self.three, self.five
        self.shares_of_three = {0: [[first[0]], [first[1]]], 1: [[first[2]], []]}
        self.shares_of_five = {0: [second[:1], second[1:3]], 1: [second[3:4], second[4:]]}
        three, five = make_value_examples((5, 9, 14)), make_value_examples(seed=3)
        self.values_of_three, self.values_of_five = three, five
        self.value_shares_of_three = {0: [[three[0]], [three[1]]], 1: [[three[2]], []]}
        self.value_shares_of_five = {0: [five[:1], five[1:3]], 1: [five[3:4], five[4:]]}
        self.shares_with_nan = {0: [second[:2], second[3:4]], 1: [[poisoned], second[4:]]}

    def checkpoint(self, stage: int) -> str:
        return str(self.folder / f"checkpoint-{stage}")

    def export(self, stage: int) -> str:
        return str(self.folder / f"export-{stage}")

    def calls(self, rank: int, stage: int) -> list[tuple[str, str, tuple]]:
        channel = ChannelAddress("shared_memory", f"test-ranks-{stage}-{free_port()}")
        return [
            ("first", "update", (self.shares_of_three[rank], POLICY)),
            ("second", "update", (self.shares_of_five[rank], POLICY)),
            ("weights", "weights", ()),
            ("log_probs", "log_probs", (self.shares_of_five[rank], "policy")),
            ("probe", "probe", (PROBE,)),
            ("refresh", "refresh_reference", ()),
            ("nan", "update", (self.shares_with_nan[rank], POLICY)),
            ("weights after nan", "weights", ()),
            ("plan", "weight_plan", (1 << 30, channel)),
            ("checksums", "fill_bucket", (0,)),
            ("export", "export", (self.export(stage),)),
            ("save", "save", (self.checkpoint(stage),)),
            *self.calls_after_save(rank),
        ]

    def calls_after_save(self, rank: int) -> list[tuple[str, str, tuple]]:
        return [
            ("third", "update", (self.shares_of_five[rank], POLICY)),
            ("fourth", "update", (self.shares_of_three[rank], POLICY)),
            ("last weights", "weights", ()),
            ("reference", "log_probs", (self.shares_of_five[rank], "reference")),
        ]

    def critic_calls(self, rank: int, stage: int) -> list[tuple[str, str, tuple]]:
        return [
            ("first", "update", (self.value_shares_of_three[rank], VALUE)),
            ("second", "update", (self.value_shares_of_five[rank], VALUE)),
            ("weights", "weights", ()),
            ("values", "values", (self.value_shares_of_five[rank],)),
            ("export", "export", (f"{self.export(stage)}-critic",)),
            ("save", "save", (f"{self.checkpoint(stage)}-critic",)),
            *self.critic_calls_after_save(rank),
        ]

    def critic_calls_after_save(self, rank: int) -> list[tuple[str, str, tuple]]:
        return [
            ("third", "update", (self.value_shares_of_five[rank], VALUE)),
            ("last weights", "weights", ()),
        ]


@pytest.fixture(scope="module")
def story(make_examples, make_value_examples, tmp_path_factory) -> Story:
    return Story(make_examples, make_value_examples, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def run_story(story, model_folder, helpers) -> Callable:
    """Run calls(rank, stage) and critic_calls(rank, stage) at every stage on two ranks.

    Returns [rank][stage]{label: answer} of the policy, and the same of the critic.
    """

    def run(calls: Callable, critic_calls: Callable) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
        jobs = []
        for rank in range(2):
            job = []
            for role, calls_of_role in (("policy", calls), ("critic", critic_calls)):
                for stage in STAGES:
                    settings = SETTINGS | {"zero_stage": stage}
                    changes = {"rank": rank, "world_size": 2, "role": role, "load_reference": role == "policy"}
                    spec = helpers.make_spec(model_folder, training=settings, **changes)
                    job.append((spec, calls_of_role(rank, stage)))
            jobs.append(job)
        results = run_ranks(jobs, story.folder)
        count = len(STAGES)
        return [answers[:count] for answers in results], [answers[count:] for answers in results]

    return run


@pytest.fixture(scope="module")
def both_roles(story, run_story) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    return run_story(story.calls, story.critic_calls)


@pytest.fixture(scope="module")
def two_ranks(both_roles) -> list[list[dict[str, Any]]]:
    return both_roles[0]


@pytest.fixture(scope="module")
def two_critic_ranks(both_roles) -> list[list[dict[str, Any]]]:
    return both_roles[1]


@pytest.fixture(scope="module")
def resumed(story, run_story, both_roles) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    def calls(rank: int, stage: int) -> list[tuple[str, str, tuple]]:
        return [("load", "load", (story.checkpoint(stage),)), *story.calls_after_save(rank)]

    def critic_calls(rank: int, stage: int) -> list[tuple[str, str, tuple]]:
        return [("load", "load", (f"{story.checkpoint(stage)}-critic",)), *story.critic_calls_after_save(rank)]

    return run_story(calls, critic_calls)


def test_two_ranks_compute_what_one_rank_does_at_every_zero_stage(two_ranks, story, learner, model_folder, helpers):
    single = learner(model_folder, training=SETTINGS)
    expected = {"first": single.update([story.three], POLICY)}
    expected["second"] = single.update([story.five[:2], story.five[2:]], POLICY)
    expected_log_probs = single.log_probs([story.five], "policy")
    for stage in STAGES:
        ours, theirs = two_ranks[0][stage], two_ranks[1][stage]
        assert helpers.relative_difference(ours["weights"], helpers.weights(single)) <= 1e-5, stage
        assert helpers.identical(theirs["weights"], ours["weights"]), "all ranks hold the same weights"
        for step, metrics in expected.items():
            for name in metrics.keys() - {"seconds"}:
                assert ours[step][name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), (stage, name)
                assert theirs[step][name] == ours[step][name] or name == "seconds", "all ranks report the same"
        log_probs = ours["log_probs"] | theirs["log_probs"]
        assert log_probs.keys() == expected_log_probs.keys()
        for example_id, values in log_probs.items():
            np.testing.assert_allclose(values, expected_log_probs[example_id], atol=1e-4)
        np.testing.assert_allclose(ours["probe"], single.probe(PROBE), atol=1e-4)


def test_a_nan_on_one_rank_skips_the_step_on_both(two_ranks, helpers):
    for rank in range(2):
        for stage in STAGES:
            answers = two_ranks[rank][stage]
            assert answers["nan"]["skipped"] == 1 and answers["nan"]["nonfinite_examples"] == ["e2"], stage
            assert helpers.identical(answers["weights after nan"], answers["weights"])


def test_weights_are_sent_and_exported_whole_by_rank_0(two_ranks, story, helpers):
    for stage in STAGES:
        weights = two_ranks[0][stage]["weights"]
        assert two_ranks[0][stage]["checksums"] == {name: tensor_checksum(value) for name, value in weights.items()}
        assert two_ranks[1][stage]["checksums"] == {}
        model = AutoModelForCausalLM.from_pretrained(story.export(stage))
        assert helpers.identical(dict(model.named_parameters()), weights)


def test_new_processes_go_on_bit_for_bit_from_a_checkpoint(two_ranks, resumed, helpers):
    for rank in range(2):
        for stage in STAGES:
            before, after = two_ranks[rank][stage], resumed[0][rank][stage]
            assert helpers.identical(after["last weights"], before["last weights"]), stage
            for step in ("third", "fourth"):
                assert {**after[step], "seconds": 0} == {**before[step], "seconds": 0}, stage


def test_every_rank_refreshes_its_whole_reference_and_gets_it_back_with_a_checkpoint(two_ranks, resumed):
    for rank in range(2):
        for stage in STAGES:
            at_refresh, reference = two_ranks[rank][stage]["log_probs"], two_ranks[rank][stage]["reference"]
            for example_id, values in at_refresh.items():
                np.testing.assert_array_equal(reference[example_id], values)
                np.testing.assert_array_equal(resumed[0][rank][stage]["reference"][example_id], values)


def test_two_critic_ranks_compute_what_one_does_at_every_zero_stage(
    two_critic_ranks, story, learner, model_folder, helpers
):
    single = learner(model_folder, training=SETTINGS, role="critic")
    expected = {"first": single.update([story.values_of_three], VALUE)}
    expected["second"] = single.update([story.values_of_five[:2], story.values_of_five[2:]], VALUE)
    expected_values = single.values([story.values_of_five])
    for stage in STAGES:
        ours, theirs = two_critic_ranks[0][stage], two_critic_ranks[1][stage]
        assert helpers.relative_difference(ours["weights"], helpers.weights(single)) <= 1e-5, stage
        assert helpers.identical(theirs["weights"], ours["weights"]), "all ranks hold the same weights"
        for step, metrics in expected.items():
            for name in metrics.keys() - {"seconds"}:
                assert ours[step][name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), (stage, name)
                assert theirs[step][name] == ours[step][name], "all ranks report the same"
        values = ours["values"] | theirs["values"]
        assert values.keys() == expected_values.keys()
        for example_id, found in values.items():
            np.testing.assert_allclose(found, expected_values[example_id], atol=1e-4)


def test_a_critic_is_exported_whole_and_goes_on_bit_for_bit(two_critic_ranks, resumed, story, helpers):
    for stage in STAGES:
        model = AutoModelForSequenceClassification.from_pretrained(f"{story.export(stage)}-critic")
        assert helpers.identical(dict(model.named_parameters()), two_critic_ranks[0][stage]["weights"])
        for rank in range(2):
            before, after = two_critic_ranks[rank][stage], resumed[1][rank][stage]
            assert helpers.identical(after["last weights"], before["last weights"]), stage
            assert {**after["third"], "seconds": 0} == {**before["third"], "seconds": 0}, stage


def test_two_reward_model_ranks_compute_what_one_does(learner, reward_model_folder, helpers, tmp_path):
    generator, objective = np.random.default_rng(0), RewardModelObjective(margin=0.2)
    pairs = [PreferencePair(row, *(generator.integers(1, 60, n) for n in (5 + row, 9 - row))) for row in range(3)]
    [weight, *_] = aggregation_weights([1] * 6, aggregation="token_mean")
    examples = [
        replace(e, token_fields={**e.token_fields, "weight": np.full(len(e.tokens), weight, np.float32)})
        for e in pair_examples(pairs)
    ]
    shares = {0: [examples[:2], examples[2:4]], 1: [examples[4:], []]}
    jobs = []
    for rank in range(2):
        calls = [("update", "update", (shares[rank], objective)), ("weights", "weights", ())]
        changes = {"rank": rank, "world_size": 2, "role": "reward_model"}
        specs = [helpers.make_spec(reward_model_folder, training={"zero_stage": s}, **changes) for s in STAGES]
        jobs.append([(spec, calls) for spec in specs])
    single = learner(reward_model_folder, role="reward_model")
    expected = single.update([examples], objective)
    for ours, theirs in zip(*run_ranks(jobs, tmp_path), strict=True):
        assert helpers.relative_difference(ours["weights"], helpers.weights(single)) <= 1e-5
        for name in expected.keys() - {"seconds"}:
            assert ours["update"][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
            assert theirs["update"][name] == ours["update"][name]


def test_a_checkpoint_of_two_ranks_is_refused_by_one(two_ranks, story, learner, model_folder):
    rank = learner(model_folder, training={"zero_stage": 2})
    with pytest.raises(RunDirectoryError, match=r"written with ranks 2, this run has ranks 1"):
        rank.load(story.checkpoint(2))


def test_a_rank_whose_peers_never_come_says_whom_it_waited_for(model_folder, helpers, tmp_path):
    spec = helpers.make_spec(model_folder, rank=0, world_size=2, timeout_s=3.0)
    [[answers]] = run_ranks([[(spec, [])]], tmp_path)
    assert isinstance(answers["error"], TrainingError)
    assert "rank 0 waited 3 s for the other 1 ranks" in str(answers["error"])
