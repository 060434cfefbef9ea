"""What the answers to held-out prompts are worth, set by set. The stream of groups is a stand-in."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.loader import load_config
from slipstream.config.schema import RLConfig
from slipstream.data.trajectory import Group, Prompt, PromptOccurrence, Trajectory
from slipstream.errors import DataError, RewardError, WeightSyncError
from slipstream.observe.evaluations import Evaluation
from slipstream.rollout.messages import SamplingParameters
from slipstream.rollout.seeds import group_seed
from slipstream.workflows import held_out
from slipstream.workflows.held_out import HeldOutPrompts, load_rl_data, summarize

RL = ["--steps=3", "--output_dir=out", "--reward.function=math", "--rollout.max_response_tokens=8"]


def prompt(row: int) -> Prompt:
    return Prompt(row=row, tokens=np.array([1]), text=f"prompt {row}", label=str(row), fields={})


def answer(
    group_id: str, reward: float | None, *, length: int = 2, cut: bool = False, version: int = 7, index: int = 0
) -> Trajectory:
    mask = np.array([False] + [True] * length)
    return Trajectory(
        group_id=group_id,
        sample_index=index,
        tokens=np.arange(length + 1),
        loss_mask=mask,
        rollout_log_probs=np.zeros(length + 1, np.float32),
        versions=np.where(mask, version, -1),
        finish_reason="length" if cut else "stop",
        prompt_text="",
        response_text=f"answer of reward {reward}",
        label=None,
        fields={},
        reward=reward,
    )


def groups(*rewards: Sequence[float | None], **options: Any) -> list[Group]:
    """One group for each prompt, with an answer for each reward."""
    return [
        Group(
            f"evaluation-{row}", prompt(row), [answer(f"evaluation-{row}", reward, **options) for reward in of_prompt]
        )
        for row, of_prompt in enumerate(rewards)
    ]


def result(sampled: list[Group], greedy: list[Group], *, success_reward: float = 1.0) -> Evaluation:
    return summarize("math", sampled=sampled, greedy=greedy, success_reward=success_reward, step=20, policy_version=7)


# ---------------------------------------------------------------- one set


def test_accuracies_are_shares_of_answers_and_pass_at_k_of_prompts() -> None:
    evaluation = result(groups([1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]), groups([1], [0], [0]))
    assert evaluation.sampled_accuracy == pytest.approx(5 / 12)
    assert evaluation.greedy_accuracy == pytest.approx(1 / 3)
    # Of four answers one is right: k of them hold it with probability k / 4.
    assert evaluation.pass_at_k == pytest.approx(
        {"pass@1": (1 / 4 + 1) / 3, "pass@2": (1 / 2 + 1) / 3, "pass@4": (1 + 1) / 3}
    )
    assert (evaluation.prompts, evaluation.samples_per_prompt, evaluation.unscored) == (3, 4, 0)
    assert (evaluation.step, evaluation.policy_version, evaluation.dataset) == (20, 7, "math")


def test_right_is_what_reaches_the_success_reward_and_the_mean_reward_counts_everything() -> None:
    evaluation = result(groups([0.5, 0.4], [0.9, -1.0]), groups([0.5], [0.49]), success_reward=0.5)
    assert (evaluation.sampled_accuracy, evaluation.greedy_accuracy) == (0.5, 0.5)
    assert evaluation.mean_reward == pytest.approx(0.2)


def test_lengths_and_truncation_are_told_apart_by_how_the_answer_was_chosen() -> None:
    sampled = [*groups([1, 0], length=3), *groups([1, 0], length=8, cut=True)]
    evaluation = result(sampled, [*groups([1], length=1), *groups([1], length=4)])
    assert (evaluation.mean_length, evaluation.max_length, evaluation.truncated_share) == (5.5, 8, 0.5)
    assert (evaluation.greedy_mean_length, evaluation.greedy_max_length) == (2.5, 4)
    assert evaluation.greedy_truncated_share == 0.0


def test_answers_that_were_not_scored_are_counted_and_left_out() -> None:
    evaluation = result(groups([1, None, 0, None], [1, 1, 1, 1], [None] * 4), groups([None], [1], [0]))
    assert evaluation.unscored == 7
    assert evaluation.sampled_accuracy == pytest.approx(5 / 6)
    assert evaluation.greedy_accuracy == pytest.approx(1 / 2)
    assert evaluation.mean_reward == pytest.approx(5 / 6)
    assert evaluation.pass_at_k == pytest.approx({"pass@1": (1 / 2 + 1) / 2, "pass@2": 1.0, "pass@4": 1.0}), (
        "over the prompts with enough answers: two, two and one"
    )


def test_a_k_that_no_prompt_has_enough_answers_for_has_no_value() -> None:
    evaluation = result(groups([1, 0, None, None], [0, 0, None, 0]), groups([1], [0]))
    assert list(evaluation.pass_at_k) == ["pass@1", "pass@2"]


def test_an_answer_that_is_cut_off_or_empty_is_still_an_answer() -> None:
    evaluation = result(groups([1, 0], length=0), groups([1], length=0))
    assert (evaluation.mean_length, evaluation.max_length) == (0.0, 0)


@pytest.mark.parametrize(
    ("sampled", "greedy", "named"), [([None, None], [1], "2 sampled"), ([1, None], [None], "1 greedy")]
)
def test_without_any_reward_the_evaluation_fails(
    sampled: list[float | None], greedy: list[float | None], named: str
) -> None:
    with pytest.raises(RewardError, match=f"failed for all {named} answers to math prompts: look at reward.function"):
        result(groups(sampled), groups(greedy))


def test_a_few_of_the_sampled_answers_are_kept_to_be_read() -> None:
    evaluation = result(groups(*[[1, 0]] * 20), groups(*[[1]] * 20))
    assert [sample.prompt for sample in evaluation.samples] == [f"prompt {row}" for row in range(8)]
    assert evaluation.samples[0].response == "answer of reward 1"


# ---------------------------------------------------------------- all sets


class StreamStandIn:
    """Answers like `GroupStream`, in another order than asked. The `made` class list holds all of them."""

    made: list["StreamStandIn"]
    version = 7

    def __init__(self, _: Any, sampling: SamplingParameters, *, samples_per_prompt: int, purpose: str) -> None:
        assert purpose == "evaluation"
        self.sampling, self.samples = sampling, samples_per_prompt
        self.asked: list[str] = []
        self._groups: list[Group] = []
        self.made.append(self)

    def submit(self, occurrences: Sequence[PromptOccurrence]) -> None:
        self.asked = [occurrence.group_id for occurrence in occurrences]
        for occurrence in occurrences:
            # Row r is answered right in all samples but the first r, greedily only row 0.
            row = occurrence.prompt.row
            rewards = [float(index >= row) for index in range(self.samples)]
            answers = [answer(occurrence.group_id, reward, version=self.version) for reward in rewards]
            self._groups.append(Group(occurrence.group_id, occurrence.prompt, answers))

    @property
    def is_empty(self) -> bool:
        return not self._groups

    def next_group(self) -> Group | None:
        return self._groups.pop()


class GeneratorsStandIn:
    """Engines of which nothing is asked but to forget the prefixes they know."""

    call_timeout_s = 1.0

    def __init__(self) -> None:
        self.engines: list[Any] = []
        self.restarts = self
        self.calls: list[str] = []

    def call_ready(self, engines: Sequence[Any], method: str, *, deadline_s: float) -> None:
        self.calls.append(method)


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Evaluation]]:
    """Evaluates sets of so many prompts at step 20 and version 7."""
    monkeypatch.setattr(held_out, "GroupStream", StreamStandIn)
    monkeypatch.setattr(StreamStandIn, "made", [], raising=False)
    overrides = ["--model.path=m", "--data.source=d.jsonl", "--evaluation.samples_per_prompt=2"]
    config = load_config(RLConfig, None, [*RL, *overrides, "--rollout.temperature=0.7"])

    def call(**sizes: int) -> list[Evaluation]:
        sets = {name.replace("_", "-"): [prompt(row) for row in range(size)] for name, size in sizes.items()}
        generators: Any = GeneratorsStandIn()
        found = HeldOutPrompts(sets, generators, config).evaluate(step=20, policy_version=7)
        assert generators.calls == ["reset_prefix_cache"], "what training draws next must not depend on an evaluation"
        return found

    return call


def test_each_set_has_a_result_of_its_own(evaluate: Callable[..., list[Evaluation]]) -> None:
    first, second = evaluate(held_out=1, math=3)
    assert (first.dataset, first.prompts, first.sampled_accuracy, first.greedy_accuracy) == ("held-out", 1, 1.0, 1.0)
    assert (second.dataset, second.prompts) == ("math", 3)
    assert second.sampled_accuracy == pytest.approx((2 + 1 + 0) / 6)
    assert second.pass_at_k["pass@2"] == pytest.approx(2 / 3)
    assert second.greedy_accuracy == pytest.approx(1 / 3)
    assert [sample.prompt for sample in second.samples] == ["prompt 0", "prompt 1", "prompt 2"], "in order"


def test_all_sets_are_answered_in_one_go_sampled_and_then_greedily(evaluate: Callable[..., Any]) -> None:
    evaluate(held_out=2, math=2)
    sampled, greedy = StreamStandIn.made
    assert sampled.asked == greedy.asked
    assert len(set(sampled.asked)) == 4
    assert (sampled.sampling.temperature, sampled.samples) == (0.7, 2)
    assert (greedy.sampling.temperature, greedy.samples) == (0.0, 1)


def test_the_same_row_of_two_sets_is_sampled_with_another_seed(evaluate: Callable[..., Any]) -> None:
    evaluate(held_out=2, math=2)
    seeds = {group_seed(0, group_id, purpose="evaluation") for group_id in StreamStandIn.made[0].asked}
    assert len(seeds) == 4


def test_an_answer_of_another_policy_version_is_an_error(
    evaluate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamStandIn, "version", 6)
    with pytest.raises(WeightSyncError, match="evaluation of policy version 7 was given by version 6"):
        evaluate(held_out=2)


# ---------------------------------------------------------------- the data


@pytest.fixture
def sources(tmp_path: Path, write_rows: Callable[..., Path], tiny_policy: Path) -> list[str]:
    """Ten training rows, of which the first two and the last one are held out in two sets."""
    rows = [{"prompt": f"What is {number} + 1?", "label": str(number + 1)} for number in range(10)]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "first.jsonl", rows[:2])
    write_rows(tmp_path / "second.jsonl", rows[-1:])
    return [
        f"--model.path={tiny_policy}",
        f"--data.source={tmp_path / 'train.jsonl'}",
        f"--evaluation.data.source={tmp_path / 'first.jsonl'}",
        f"--evaluation.other_data.second.source={tmp_path / 'second.jsonl'}",
    ]


def test_prompts_of_every_set_are_kept_out_of_training(sources: list[str]) -> None:
    data = load_rl_data(load_config(RLConfig, None, [*RL, *sources]))
    assert {name: len(prompts) for name, prompts in data.held_out.items()} == {"held-out": 2, "second": 1}
    assert [prompt.row for prompt in data.training.items] == [2, 3, 4, 5, 6, 7, 8]
    kept = load_rl_data(load_config(RLConfig, None, [*RL, *sources, "--evaluation.exclude_from_training=false"]))
    assert len(kept.training.items) == 10


def test_without_held_out_data_there_are_no_sets(sources: list[str]) -> None:
    assert load_rl_data(load_config(RLConfig, None, [*RL, *sources[:2]])).held_out == {}


def test_data_of_a_set_that_cannot_be_used_is_named_with_its_set(sources: list[str]) -> None:
    short = "--evaluation.other_data.second.max_prompt_tokens=1"
    with pytest.raises(DataError, match=r"^evaluation\.other_data\.second\.source: no row .* is left to use"):
        load_rl_data(load_config(RLConfig, None, [*RL, *sources, short]))
