"""Two learner ranks, in processes of their own, compute what one rank computes.

Starting processes is the slow part, so one pair runs a whole story at every ZeRO stage, first as policy and then as
critic, and the tests look at its parts; a second pair goes on from the checkpoints of the first.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slipstream.algorithms.aggregation import Aggregation, aggregation_weights
from slipstream.algorithms.correction import Correction
from slipstream.algorithms.objective import DistillationObjective, PolicyObjective, SupervisedObjective
from slipstream.algorithms.policy_loss import POLICY_LOSSES
from slipstream.algorithms.preference_loss import PairObjective, UnpairedObjective
from slipstream.algorithms.reward_model_loss import RewardModelObjective
from slipstream.algorithms.value_loss import ValueObjective
from slipstream.config.lora import LoraConfig
from slipstream.data.preferences import PreferencePair, answer_examples, pair_examples
from slipstream.data.shared_prompts import plan_with_shared_prompts
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import TrainingError
from slipstream.training.reference import TeacherSpec
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import ChannelAddress
from slipstream.workflows.batch import with_weights

POLICY = PolicyObjective(clip_low=0.2, clip_high=0.2)
VALUE = ValueObjective(value_clip=0.2)
STAGES = (0, 1, 2, 3)
AGGREGATIONS = get_args(Aggregation)
CORRECTIONS = [
    None,
    *(
        Correction(mode, level, low=0.7, high=1.4)
        for mode, level in product(("truncate", "mask"), ("token", "sequence"))
    ),
]
TIMEOUT_S = 270
# Small chunks: the two ranks need different numbers of them.
SETTINGS = {"logits_chunk_tokens": 4, "gradient_clip": 0.5}
PROBE = np.arange(1, 6)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


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
        channel = ChannelAddress("shared_memory", f"test-ranks-{stage}-{os.getpid()}")
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
                    changes = {"rank": rank, "data_parallel": 2, "role": role, "load_reference": role == "policy"}
                    spec = helpers.make_spec(model_folder, training=settings, **changes)
                    job.append((spec, calls_of_role(rank, stage)))
            jobs.append(job)
        results = helpers.run_ranks(jobs, story.folder, timeout_s=TIMEOUT_S)
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


def make_pair(row: int, generator: np.random.Generator) -> PreferencePair:
    """Two answers, from the third token on, whose lengths depend on the row."""
    answers = [generator.integers(1, 60, length) for length in (5 + row, 9 - row)]
    return PreferencePair(str(row), *answers, *(np.arange(len(answer)) >= 2 for answer in answers))


def test_two_reward_model_ranks_compute_what_one_does(learner, reward_model_folder, helpers, tmp_path):
    """Three pairs, so that one rank measures one and the other two: an accuracy is over exactly these."""
    generator, objective = np.random.default_rng(0), RewardModelObjective(margin=0.2)
    pairs = [make_pair(row, generator) for row in range(3)]
    [weight, *_] = aggregation_weights([1] * 6, aggregation="token_mean")
    examples = [
        replace(e, token_fields={**e.token_fields, "weight": np.full(len(e.tokens), weight, np.float32)})
        for e in pair_examples(pairs)
    ]
    shares = {0: [examples[:2], examples[2:4]], 1: [examples[4:], []]}
    jobs = []
    for rank in range(2):
        calls = [("held out", "loss", (shares[rank], objective)), ("update", "update", (shares[rank], objective))]
        calls.append(("weights", "weights", ()))
        changes = {"rank": rank, "data_parallel": 2, "role": "reward_model"}
        specs = [helpers.make_spec(reward_model_folder, training={"zero_stage": s}, **changes) for s in STAGES]
        jobs.append([(spec, calls) for spec in specs])
    single = learner(reward_model_folder, role="reward_model")
    held_out = single.loss([examples], objective)
    right = sum(
        _score(single, better) > _score(single, worse) for better, worse in zip(*[iter(examples)] * 2, strict=True)
    )
    assert held_out["accuracy"] == pytest.approx(right / 3)
    expected = single.update([examples], objective)
    for ours, theirs in zip(*helpers.run_ranks(jobs, tmp_path, timeout_s=TIMEOUT_S), strict=True):
        assert helpers.relative_difference(ours["weights"], helpers.weights(single)) <= 1e-5
        for name in expected.keys() - {"seconds"}:
            assert ours["update"][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
            assert theirs["update"][name] == ours["update"][name]
        assert ours["held out"]["accuracy"] == theirs["held out"]["accuracy"] == pytest.approx(right / 3)


def _score(learner, example) -> float:
    """The score of one sequence, alone in its row."""
    [[score]] = learner.scores([[example]]).values()
    return float(score)


def test_two_ranks_learn_from_preferences_what_one_does(learner, model_folder, helpers, tmp_path):
    """Three rows on two ranks, so that one of them runs a zero-weight micro-batch; pairs, then single answers."""
    generator = np.random.default_rng(1)
    pairs = [make_pair(row, generator) for row in range(3)]
    examples = []
    for pair in pairs:
        both = answer_examples(pair)
        for e in both:
            values = {
                "weight": np.full(len(e.tokens), 1 / (3 * sum(int(each.loss_mask.sum()) for each in both))),
                "reference_log_probs": generator.normal(-4, 1, len(e.tokens)),
                "is_desirable": e.token_fields["is_chosen"],
                "reference_point": np.full(len(e.tokens), 0.2),
            }
            fields = {name: value.astype(np.float32) for name, value in values.items()}
            examples.append(replace(e, token_fields=e.token_fields | fields))
    shares = {0: [examples[:2], examples[2:4]], 1: [examples[4:], []]}
    objectives = {stage: PairObjective(loss="dpo", beta=0.3, sft_coefficient=0.1) for stage in STAGES}
    kto = UnpairedObjective(beta=0.3, undesirable_weight=2.0)
    jobs = []
    for rank in range(2):
        changes = {"rank": rank, "data_parallel": 2, "temperature": 1.0}
        jobs.append([])
        for stage, objective in [*objectives.items(), (1, kto)]:
            calls = [("update", "update", (shares[rank], objective)), ("weights", "weights", ())]
            jobs[-1].append((helpers.make_spec(model_folder, training={"zero_stage": stage}, **changes), calls))
    first, second = helpers.run_ranks(jobs, tmp_path, timeout_s=TIMEOUT_S)
    for objective, places in ((objectives[1], STAGES), (kto, (len(STAGES),))):
        single = learner(model_folder, temperature=1.0)
        expected = single.update([examples], objective)
        for place in places:
            assert helpers.relative_difference(first[place]["weights"], helpers.weights(single)) <= 1e-5, place
            for name in expected.keys() - {"seconds"}:
                assert first[place]["update"][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
                assert second[place]["update"][name] == first[place]["update"][name]


def test_two_ranks_learn_from_a_teacher_from_entropy_and_by_imitation_what_one_does(
    learner, model_folder, untied_model_folder, make_examples, helpers, tmp_path
):
    """Three examples on two ranks, so that one runs a zero-weight micro-batch; chunks differ in number."""
    objectives = {"forward": DistillationObjective(coefficient=0.7, temperature=2.0)}
    objectives["reverse"] = DistillationObjective()
    # Without a teacher, but with a second output that has a gradient.
    objectives["entropy"] = replace(POLICY, entropy_coefficient=0.5)
    objectives["imitation"] = SupervisedObjective()
    a, b, c = make_examples((5, 9, 14))
    shares = {0: [[a], [b]], 1: [[c], []]}
    cases = [(name, stage) for name in objectives for stage in STAGES]

    def changes(name: str) -> dict[str, Any]:
        if name in ("entropy", "imitation"):
            return {}
        spec = TeacherSpec(str(untied_model_folder), "teacher.path", name, objectives[name].temperature)
        return {"teacher": spec, "temperature": 1.0}

    jobs = []
    for rank in range(2):
        jobs.append([])
        for name, stage in cases:
            calls = [("update", "update", (shares[rank], objectives[name])), ("weights", "weights", ())]
            training = SETTINGS | {"zero_stage": stage}
            options = changes(name) | {"rank": rank, "data_parallel": 2}
            jobs[-1].append((helpers.make_spec(model_folder, training=training, **options), calls))
    first, second = helpers.run_ranks(jobs, tmp_path, timeout_s=TIMEOUT_S)
    for name, objective in objectives.items():
        single = learner(model_folder, training=SETTINGS, **changes(name))
        expected = single.update([[a, b, c]], objective)
        for place, case in enumerate(cases):
            if case[0] == name:
                assert helpers.relative_difference(first[place]["weights"], helpers.weights(single)) <= 1e-5, case
                for metric in expected.keys() - {"seconds"}:
                    assert first[place]["update"][metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), case
                    assert second[place]["update"][metric] == first[place]["update"][metric]


# (stage that wrote a checkpoint, stage that goes on from it): each once in either place.
CHANGES = [(0, 0), (1, 2), (2, 3), (3, 1), (3, 3)]


@pytest.mark.parametrize(("written", "read"), CHANGES)
def test_one_rank_goes_on_from_a_checkpoint_of_two(written, read, two_ranks, story, learner, model_folder, helpers):
    rank = learner(model_folder, training=SETTINGS | {"zero_stage": read}, load_reference=True)
    change = rank.load(story.checkpoint(written))
    assert change == "ranks 2 to 1" + (f", ZeRO stage {written} to {read}" if written != read else "")
    expected = two_ranks[0][written]
    for step, examples in (("third", story.five), ("fourth", story.three)):
        found = rank.update([examples], POLICY)
        for name in found.keys() - {"seconds"}:
            assert found[name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6), (step, name)
        assert found["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5, abs=1e-6)
    assert helpers.relative_difference(helpers.weights(rank), expected["last weights"]) <= 1e-5
    assert not list(story.folder.parent.glob("*.partial")), "the conversion is removed"


def test_two_ranks_go_on_from_a_checkpoint_of_one_and_leave_one_for_it(
    story, learner, model_folder, make_examples, helpers, tmp_path
):
    """With states in host memory, weights that decay, and an average of the weights, whose pieces are other ones."""
    options = SETTINGS | {"weight_decay": 0.1, "ema_decay": 0.5}
    cells = [(*change, None) for change in CHANGES] + [(1, 3, LoraConfig(rank=4))]
    straight, jobs = [], [[], []]
    for place, (written, read, lora) in enumerate(cells):
        single = learner(model_folder, training=options | {"zero_stage": written}, lora=lora)
        single.update([story.three], POLICY)
        single.save(str(tmp_path / str(place) / "one"))
        straight.append(single)
        for rank in range(2):
            training = options | {"zero_stage": read, "offload_optimizer": read > 0}
            spec = helpers.make_spec(model_folder, training=training, rank=rank, data_parallel=2, seed=5, lora=lora)
            calls = [
                ("load", "load", (str(tmp_path / str(place) / "one"),)),
                ("update", "update", (story.shares_of_five[rank], POLICY)),
                ("save", "save", (str(tmp_path / str(place) / "two"),)),
                ("weights", "weights", ()),
                ("export", "export", (str(tmp_path / str(place) / "export of two"), True)),
            ]
            jobs[rank].append((spec, calls))
    results = helpers.run_ranks(jobs, tmp_path, timeout_s=TIMEOUT_S)
    for place, (written, read, lora) in enumerate(cells):
        single, folder = straight[place], tmp_path / str(place)
        expected = single.update([story.five], POLICY)
        for result in results:
            assert "error" not in result[place], result[place]["error"]
            assert result[place]["load"].startswith("ranks 1 to 2")
            assert result[place]["update"]["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
        assert helpers.identical(helpers.exported(folder / "export of two"), results[0][place]["weights"])
        back = learner(model_folder, training=options | {"zero_stage": written}, lora=lora)
        back.load(str(folder / "two"))
        for rank in (single, back):
            rank.update([make_examples(seed=4)], POLICY)
        assert helpers.relative_difference(helpers.weights(back), helpers.weights(single)) <= 1e-5, (written, read)
        for rank, name in ((single, "straight"), (back, "back")):
            rank.export(str(folder / name))
        averages = helpers.exported(folder / "back"), helpers.exported(folder / "straight")
        assert helpers.relative_difference(*averages) <= 1e-5, (written, read)
    # The second rank did not exist before: its random states come from the seed.
    states = torch.load(tmp_path / "1" / "two" / "random_state_rank_1.pt", weights_only=False)
    torch.manual_seed(5 + 1)
    assert torch.equal(states["torch"], torch.get_rng_state())


def test_a_rank_whose_peers_never_come_says_whom_it_waited_for(model_folder, helpers, tmp_path):
    spec = helpers.make_spec(model_folder, rank=0, data_parallel=2, timeout_s=3.0)
    [[answers]] = helpers.run_ranks([[(spec, [])]], tmp_path, timeout_s=TIMEOUT_S)
    assert isinstance(answers["error"], TrainingError)
    assert "rank 0 waited 3 s for the other 1 ranks" in str(answers["error"])


def test_every_loss_aggregation_and_correction_has_one_gradient_on_one_rank_and_on_two(
    learner, make_examples, model_folder, helpers, tmp_path
):
    """One update after the other. The large epsilon makes a step of Adam proportional to the gradients so far."""
    training = {"zero_stage": 2, "learning_rate": 5.0, "epsilon": 1e6, "gradient_clip": 1e9}
    single = learner(model_folder, training=training)
    examples = make_examples()
    start, before = single.log_probs([examples], "policy"), helpers.weights(single)
    counts = [int(example.loss_mask.sum()) for example in examples]
    generator = np.random.default_rng(5)
    for example in examples:
        noise = generator.normal(size=(2, len(example.tokens))).astype(np.float32)
        old = np.zeros(len(example.tokens), np.float32)
        old[example.loss_mask] = start[example.example_id]
        example.token_fields["old_log_probs"] = old + 0.2 * noise[0]
        example.token_fields["rollout_log_probs"] = old + 0.2 * noise[0] + 0.3 * noise[1]
    updates: dict[int, list] = {0: [], 1: [], 2: []}
    # Aggregations by turns: each meets every loss.
    for number, (policy_loss, correction) in enumerate(product(POLICY_LOSSES, CORRECTIONS)):
        aggregation = AGGREGATIONS[number % len(AGGREGATIONS)]
        objective = PolicyObjective(clip_low=0.1, clip_high=0.2, policy_loss=policy_loss, correction=correction)
        weights = aggregation_weights(counts, aggregation=aggregation, constant_length=12)
        a, b, c, d, e = with_weights(examples, weights)
        updates[0].append(([[a], [b]], objective))
        updates[1].append(([[c, d], [e]], objective))
        updates[2].append(([[a, b, c, d, e]], objective))
    jobs = []
    for rank in range(2):
        spec = helpers.make_spec(model_folder, training=training, rank=rank, data_parallel=2)
        calls = [(str(number), "update", update) for number, update in enumerate(updates[rank])]
        jobs.append([(spec, [*calls, ("weights", "weights", ())])])
    [[ours], [theirs]] = helpers.run_ranks(jobs, tmp_path, timeout_s=TIMEOUT_S)
    for number, update in enumerate(updates[2]):
        expected = single.update(*update)
        assert expected["gradient_norm"] > 1e-3
        for name in ("loss", "gradient_norm"):
            assert ours[str(number)][name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (number, name)
            assert theirs[str(number)][name] == ours[str(number)][name]
    after = helpers.weights(single)
    assert helpers.relative_difference(before, after) > 1e-4, "they moved"
    assert helpers.relative_difference(ours["weights"], after) <= 1e-6


def test_two_ranks_that_split_a_group_compute_what_plain_packing_does(learner, model_folder, helpers, tmp_path):
    generator = np.random.default_rng(4)
    prompt, examples = generator.integers(1, 60, 6), []
    for member, length in enumerate((3, 5, 3, 2, 7)):
        tokens = np.concatenate([prompt, generator.integers(1, 60, length)])
        advantages = np.full(len(tokens), generator.normal())
        fields = {"weight": np.full(len(tokens), 1 / 20, np.float32), "advantages": advantages.astype(np.float32)}
        examples.append(TrainingExample(str(member), tokens, np.arange(len(tokens)) >= 6, fields))
    shares = plan_with_shared_prompts([[example] for example in examples], tokens_per_micro_batch=40, ranks=2)
    assert all(example.shared_tokens == 6 for share in shares for batch in share for example in batch)
    jobs = []
    for rank in range(2):
        calls = [("update", "update", (shares[rank], POLICY)), ("weights", "weights", ())]
        specs = [
            helpers.make_spec(model_folder, training={"zero_stage": stage}, rank=rank, data_parallel=2)
            for stage in STAGES
        ]
        jobs.append([(spec, calls) for spec in specs])
    single = learner(model_folder)
    expected = single.update([examples], POLICY)
    for ours, theirs in zip(*helpers.run_ranks(jobs, tmp_path, timeout_s=TIMEOUT_S), strict=True):
        assert helpers.relative_difference(ours["weights"], helpers.weights(single)) <= 1e-5
        assert helpers.identical(theirs["weights"], ours["weights"])
        for name in expected.keys() - {"seconds"}:
            assert ours["update"][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
