"""The answers of `slipstream generate` as records, and what is chosen from them: best of n, and pairs.

Pure functions of the records in `answers.jsonl`, so that a run that was interrupted chooses what one that was not
chooses. Chosen are only answers that can be learned from as they are: finished and not empty. One that was cut at the
limit is never chosen, neither as the better answer nor as the worse one: written as data it would look finished.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.algorithms.evaluation import pass_at_k
from slipstream.config.evaluation import pass_at_name, pass_at_sizes
from slipstream.data.prompts import is_blank
from slipstream.data.trajectory import Group, Trajectory

Record = dict[str, Any]


def answer_record(group: Group, source: str) -> Record:
    """The line of a prompt: what was asked, as it lies in the source, and every answer with what it is worth.

    `source` is the name of one of several sources, '' where there is one.
    """
    prompt = group.prompt
    return {
        **({"source": source} if source else {}),
        "row": prompt.row,
        "prompt": prompt.given,
        "label": prompt.label,
        "samples": [_sample(trajectory, group) for trajectory in group.trajectories],
    }


def best_answer(record: Mapping[str, Any], minimum_reward: float | None) -> Record | None:
    """The answer with the highest reward, the first of several; None if none can be chosen or its reward is too low."""
    samples = _eligible(record)
    best = max(samples, key=lambda sample: float(sample["reward"]), default=None)
    return None if best is None or (minimum_reward is not None and best["reward"] < minimum_reward) else best


def worst_answer(record: Mapping[str, Any], best: Mapping[str, Any]) -> Record | None:
    """The answer with the lowest reward, the first of several; None if it is worth no less than `best`."""
    worst = min(_eligible(record), key=lambda sample: float(sample["reward"]))
    return worst if worst["reward"] < best["reward"] and worst["response"] != best["response"] else None


def best_rows(records: Iterable[Record], minimum_reward: float | None) -> Iterator[Record]:
    """Rows for supervised fine-tuning: `prompt` and `response`, of every prompt that has a best answer."""
    for record in records:
        best = best_answer(record, minimum_reward)
        if best is not None:
            yield {**_origin(record), "response": best["response"], "reward": best["reward"]}


def pair_rows(records: Iterable[Record], minimum_reward: float | None) -> Iterator[Record]:
    """Rows for preference training: `prompt`, `chosen` (the best answer) and `rejected` (the worst one)."""
    for record in records:
        best = best_answer(record, minimum_reward)
        worst = None if best is None else worst_answer(record, best)
        if best is not None and worst is not None:
            rewards = {"chosen_reward": best["reward"], "rejected_reward": worst["reward"]}
            yield {**_origin(record), "chosen": best["response"], "rejected": worst["response"], **rewards}


@dataclass
class AnswerCounts:
    """What all answers are worth, counted record by record.

    Rewards are over the answers that were scored, whatever ended them.
    """

    minimum_reward: float | None
    prompts: int = 0
    answers: int = 0
    tokens: int = 0
    truncated: int = 0
    unscored: int = 0
    equal_rewards: int = 0
    rewards: list[list[float]] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        """Count the answers to one prompt."""
        samples = record["samples"]
        rewards = [float(sample["reward"]) for sample in samples if sample["reward"] is not None]
        self.prompts += 1
        self.answers += len(samples)
        self.tokens += sum(sample["tokens"] for sample in samples)
        self.truncated += sum(sample["finish_reason"] == "length" for sample in samples)
        self.unscored += len(samples) - len(rewards)
        self.equal_rewards += bool(rewards) and min(rewards) == max(rewards)
        if rewards:
            self.rewards.append(rewards)

    def summary(self, *, is_scored: bool) -> Record:
        """The counts as shares and means; of rewards only where there is a reward."""
        result: Record = {
            "prompts": self.prompts,
            "answers": self.answers,
            "mean_length": self.tokens / self.answers,
            "truncated_share": self.truncated / self.answers,
        }
        if not is_scored:
            return result
        scored = [reward for rewards in self.rewards for reward in rewards]
        return result | {
            "mean_reward": sum(scored) / len(scored) if scored else None,
            "best_mean_reward": sum(map(max, self.rewards)) / len(self.rewards) if scored else None,
            **self._pass_at_k(),
            "equal_rewards_share": self.equal_rewards / self.prompts,
            "unscored": self.unscored,
        }

    def _pass_at_k(self) -> dict[str, float]:
        """pass@k with what reaches the minimum as right, over the prompts with at least k scored answers."""
        if self.minimum_reward is None:
            return {}
        outcomes = [[reward >= self.minimum_reward for reward in rewards] for rewards in self.rewards]
        return {
            pass_at_name(k): pass_at_k([answers for answers in outcomes if len(answers) >= k], k)
            for k in pass_at_sizes(max(map(len, outcomes), default=0))
        }


def _sample(trajectory: Trajectory, group: Group) -> Record:
    failure = group.failures.get(trajectory.trajectory_id)
    return {
        "response": trajectory.response_text,
        "finish_reason": trajectory.finish_reason,
        "tokens": trajectory.response_length,
        "reward": trajectory.reward,
        "parts": trajectory.reward_parts,
        "answer": trajectory.answer,
        "failure": None if failure is None else str(failure),
    }


def _eligible(record: Mapping[str, Any]) -> list[Record]:
    """The answers that can be chosen: scored, finished, not empty."""
    return [
        sample
        for sample in record["samples"]
        if sample["reward"] is not None and sample["finish_reason"] == "stop" and not is_blank(sample["response"])
    ]


def _origin(record: Mapping[str, Any]) -> Record:
    return {name: record[name] for name in ("source", "row", "prompt") if name in record}
