"""The messages that cross processes: prompts, trajectories, groups and training examples.

Token-in, token-out: the ids an engine sampled are the ids that are trained on; text is made for people and reward
functions only and is never tokenized again.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.data.failure import RewardFailure
from slipstream.data.turn import Turn

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "environment", "aborted"]

BASELINE_INDEX = -1
"""The sample index of a group's greedy baseline, which is none of its samples."""


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, rendered and tokenized.

    `row` is its index in the source; `text` is what `tokens` spell; `fields` holds all columns of the row. `messages`
    are those of a row that has a list of them, as the chat template was given them; empty where it has one text.
    `given` is the prompt as it lies in the row: its text, or its list of messages.
    """

    row: int
    tokens: IntArray
    text: str
    label: Any
    fields: dict[str, Any]
    messages: tuple[Turn, ...] = ()
    given: Any = None


@dataclass(frozen=True)
class PromptOccurrence:
    """A prompt drawn from the data at one moment. `group_id` names the group of trajectories it will have.

    `group_id` is `"{epoch}-{position}"`: unique within a run, the same after a resume.
    """

    group_id: str
    prompt: Prompt


@dataclass(frozen=True)
class Sample:
    """One response as an engine returns it. All arrays have the length of the response.

    `tokens` include the end-of-sequence token where the policy chose it. `log_probs` are those of the distribution
    that was sampled (temperature applied). `versions` say which policy version chose each token.
    """

    tokens: IntArray
    log_probs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    seconds: float


@dataclass
class Trajectory:
    """One sampled episode: tokens of prompt, policy and environment in the order the policy saw them.

    Arrays have length L, the whole sequence. `loss_mask` is True where the policy chose the token; elsewhere
    `rollout_log_probs` is 0 and `versions` is -1. `reward` is None until it has been scored; `answer` is what the
    reward function read from the response, where it says so. `turns` is the episode as text: the prompt, then what
    policy and environment said in turn.
    """

    group_id: str
    sample_index: int
    tokens: IntArray
    loss_mask: BoolArray
    rollout_log_probs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    prompt_text: str
    response_text: str
    label: Any
    fields: dict[str, Any]
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    turns: tuple[Turn, ...] = ()
    answer: str | None = None

    @property
    def trajectory_id(self) -> str:
        """Unique within a run."""
        member = "baseline" if self.sample_index == BASELINE_INDEX else self.sample_index
        return f"{self.group_id}/{member}"

    @property
    def response_length(self) -> int:
        """Tokens the policy chose: the one definition of length."""
        return int(self.loss_mask.sum())


@dataclass
class Group:
    """The scored trajectories of one prompt occurrence, and the failures of those that could not be scored, by id.

    `baseline` is the greedy answer to the same prompt, where the run asks for one: scored, never trained on.
    `reads_answers`: the reward says which answer it read, so a trajectory without one had none that could be read.
    """

    group_id: str
    prompt: Prompt
    trajectories: list[Trajectory]
    failures: dict[str, RewardFailure] = field(default_factory=dict)
    baseline: Trajectory | None = None
    reads_answers: bool = False


@dataclass(frozen=True)
class TrainingExample:
    """What the learner needs of one sequence.

    `tokens` and `loss_mask` have length L. Every array of `token_fields` has length L as well; only its entries
    where `loss_mask` is True are ever read (advantages, old, rollout and reference log-probs, weights).
    `shared_tokens`: so many of its first tokens are to be computed once, together with those of its neighbours in the
    micro-batch that have as many and the same ones (data/shared_prompts.py).
    """

    example_id: str
    tokens: IntArray
    loss_mask: BoolArray
    token_fields: dict[str, FloatArray] = field(default_factory=dict)
    shared_tokens: int = 0
