"""A loud warning for a rollout batch whose rewards say nothing: all equal, or no answer could be read.

Both are how a broken reward looks from outside: a label in the wrong column, a marker that the model was never told
of, a verifier that pays everybody. A batch in which everything is right looks equal too, late in a run that went well;
what tells them apart is whether rewards have differed before.
"""

from collections.abc import Sequence

from slipstream.data.trajectory import Group, Trajectory
from slipstream.observe.logs import get_logger

REPEAT_STEPS = 25
"""Steps before the warning is given again, while batch after batch is such."""

SHOWN_SAMPLES = 3
SHOWN_TEXT = 160
"""Characters of a prompt's end and of a response's end that are shown."""

logger = get_logger("reward")


class RewardAlarm:
    """Looks at each rollout batch. Remembers nothing across a resume: the warning may come once more."""

    def __init__(self, success_reward: float) -> None:
        """`success_reward`: from which reward on a response counts as right (`evaluation.success_reward`)."""
        self._success_reward = success_reward
        self._have_differed = False
        self._last_warning: int | None = None

    def look(self, step: int, groups: Sequence[Group]) -> str | None:
        """Warn of the batch of `step`, with three samples, if it is such; returns the warning that was given."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        problem = self._problem(groups, trajectories)
        self._have_differed = self._have_differed or len({each.reward for each in trajectories}) > 1
        if problem is None or (self._last_warning is not None and step < self._last_warning + REPEAT_STEPS):
            return None
        self._last_warning = step
        logger.warning(problem, step=step)
        for sample in [group.trajectories[0] for group in groups[:SHOWN_SAMPLES]]:
            logger.warning(
                f"sample {sample.trajectory_id}",
                prompt=_end(sample.prompt_text),
                response=_end(sample.response_text),
                label=_end(str(sample.label)),
                reward=sample.reward,
            )
        return problem

    def _problem(self, groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> str | None:
        rewards = {trajectory.reward for trajectory in trajectories}
        reward = next(iter(rewards), None)
        are_equal = len(rewards) == 1 and reward is not None
        if are_equal and self._have_differed and reward is not None and reward >= self._success_reward:
            are_equal = False  # everything is right, which the reward has been seen to tell from wrong
        unread = any(group.reads_answers for group in groups) and all(each.answer is None for each in trajectories)
        if not are_equal and not unread:
            return None
        problems = [f"has the same reward, {reward:g}: there is nothing to learn from"] * are_equal
        problems += ["has no answer that could be read"] * unread
        return f"every one of {len(trajectories)} responses {', and '.join(problems)}; is it the reward that is wrong?"


def _end(text: str) -> str:
    return text if len(text) <= SHOWN_TEXT else "... " + text[-SHOWN_TEXT:]
