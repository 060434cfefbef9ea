"""The warning for batches whose rewards say nothing."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.trajectory import Group, Prompt, Trajectory
from slipstream.observe.alarm import REPEAT_STEPS, RewardAlarm


def trajectory(group_id: str, index: int, reward: float, answer: str | None) -> Trajectory:
    return Trajectory(
        group_id=group_id,
        sample_index=index,
        tokens=np.arange(3),
        loss_mask=np.array([False, True, True]),
        rollout_log_probs=np.zeros(3, np.float32),
        versions=np.array([-1, 0, 0]),
        finish_reason="stop",
        prompt_text="x" * 500 + f" end of the prompt of {group_id}",
        response_text=f"response {index}\n of {group_id}",
        label=f"label of {group_id}",
        fields={},
        reward=reward,
        answer=answer,
    )


def batch(*rewards: list[float], answers: str | None = None, reads_answers: bool = False) -> list[Group]:
    """One group for each list of rewards; all have the same answer."""
    groups = []
    for number, of_group in enumerate(rewards):
        prompt = Prompt(row=number, tokens=np.zeros(1, np.int64), text="", label=None, fields={})
        members = [trajectory(f"0-{number}", index, reward, answers) for index, reward in enumerate(of_group)]
        groups.append(Group(f"0-{number}", prompt, members, reads_answers=reads_answers))
    return groups


ALL_WRONG = batch([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
ALL_RIGHT = batch([1.0, 1.0], [1.0, 1.0])
MIXED = batch([0.0, 1.0], [0.0, 0.0])


def test_equal_rewards_are_shown_with_three_samples(capsys: pytest.CaptureFixture[str]) -> None:
    problem = RewardAlarm(1.0).look(3, ALL_WRONG)
    assert problem == (
        "every one of 8 responses has the same reward, 0: there is nothing to learn from; is it the reward that is "
        "wrong?"
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert problem in lines[0] and "WARNING reward" in lines[0] and "step=3" in lines[0]
    for number, line in enumerate(lines[1:]):
        assert f"sample 0-{number}/0" in line
        assert f"end of the prompt of 0-{number}" in line and "x" * 200 not in line
        assert rf'response="response 0\n of 0-{number}"' in line, "one line, whatever the response holds"
        assert f'label="label of 0-{number}" reward=0' in line


def test_rewards_that_differ_anywhere_in_the_batch_are_no_reason_to_warn(capsys: pytest.CaptureFixture[str]) -> None:
    assert RewardAlarm(1.0).look(1, batch([0.5, 0.5], [0.25, 0.25])) is None
    assert capsys.readouterr().err == ""


def test_everything_right_is_normal_once_the_reward_has_told_right_from_wrong() -> None:
    alarm = RewardAlarm(1.0)
    assert alarm.look(1, MIXED) is None
    assert alarm.look(2, ALL_RIGHT) is None
    assert alarm.look(3, ALL_WRONG) is not None


def test_everything_right_from_the_first_step_on_is_suspicious() -> None:
    assert "the same reward, 1:" in (RewardAlarm(1.0).look(1, ALL_RIGHT) or "")
    assert "the same reward, 1:" in (RewardAlarm(2.0).look(1, ALL_RIGHT) or "")


def test_answers_that_could_not_be_read_are_a_reason_even_where_rewards_differ() -> None:
    unread = batch([0.0, 0.1], reads_answers=True)
    assert "2 responses has no answer that could be read;" in (RewardAlarm(1.0).look(1, unread) or "")
    both = batch([0.0, 0.0], reads_answers=True)
    assert "learn from, and has no answer that could be read;" in (RewardAlarm(1.0).look(1, both) or "")
    assert RewardAlarm(1.0).look(1, batch([0.0, 0.1], answers="7", reads_answers=True)) is None
    assert RewardAlarm(1.0).look(1, batch([0.0, 0.1])) is None, "a reward that knows no answers has none to read"


@given(st.lists(st.booleans(), min_size=1, max_size=120))
def test_the_warning_comes_at_the_first_batch_and_then_seldom(is_constant: list[bool]) -> None:
    alarm = RewardAlarm(1.0)
    warned = [step for step, constant in enumerate(is_constant) if alarm.look(step, ALL_WRONG if constant else MIXED)]
    assert warned[:1] == [step for step, constant in enumerate(is_constant) if constant][:1]
    assert all(later - earlier >= REPEAT_STEPS for earlier, later in pairwise(warned))
    if all(is_constant):
        assert warned == list(range(0, len(is_constant), REPEAT_STEPS))
