"""What the policy answers on held-out prompts: `evaluations.jsonl`, one line for each set of an evaluation.

The workflow writes the lines, the report shows the first beside the last. Step 0 is the policy before training.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config.evaluation import FIRST_SET, qualified
from slipstream.observe.files import JsonLinesFile, read_json_lines


@dataclass(frozen=True)
class EvaluationSample:
    """One sampled answer, kept for people to read."""

    prompt: str
    label: Any
    response: str
    reward: float | None


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation on one held-out set. Accuracies are shares in [0, 1]; lengths are in tokens.

    `policy_version` is the one that gave every answer. `sampled_accuracy` is avg@k over `samples_per_prompt` answers
    to each prompt; `pass_at_k` maps `pass@1`, `pass@2`, `pass@4`, ... to its unbiased estimate, for each k that some
    prompt has enough scored answers for. Truncated are responses that were cut at the length limit; `unscored` counts
    the answers, sampled and greedy, whose reward failed and which the accuracies and `mean_reward` leave out.
    `prompts` counts the held-out prompts, `samples` holds a few of the sampled answers, the same prompts each time.
    """

    step: int
    policy_version: int
    dataset: str
    prompts: int
    samples_per_prompt: int
    sampled_accuracy: float
    greedy_accuracy: float
    pass_at_k: dict[str, float]
    mean_reward: float
    mean_length: float
    max_length: int
    truncated_share: float
    greedy_mean_length: float
    greedy_max_length: int
    greedy_truncated_share: float
    unscored: int
    samples: list[EvaluationSample] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """Everything measured, by name; in `checkpoint.best_metric` and behind `evaluation/` the set's name leads."""
        values = asdict(self)
        for name in ("step", "policy_version", "dataset", "prompts", "samples_per_prompt", "samples"):
            del values[name]
        values |= values.pop("pass_at_k")
        return {qualified(self.dataset, name): value for name, value in values.items()}


class EvaluationWriter:
    """Appends to `evaluations.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path)

    def write(self, evaluation: Evaluation) -> None:
        """Append one evaluation. Raises TrainingError if the disk is full."""
        self._file.write(asdict(evaluation))

    def sync(self) -> None:
        """Make all lines durable against power loss."""
        self._file.sync()

    def truncate_after(self, step: int) -> None:
        """Drop evaluations of later steps, when a run is resumed from the checkpoint of `step`."""
        self._file.truncate_after(step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_evaluations(path: Path) -> list[Evaluation]:
    """All evaluations of a run on all sets, in order; none if there is no such file."""
    return [
        Evaluation(**{**line, "samples": [EvaluationSample(**sample) for sample in line["samples"]]})
        for line in read_json_lines(path)
    ]


def by_dataset(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """The evaluations of each set, in order; the first held-out set comes first."""
    sets: dict[str, list[Evaluation]] = {}
    for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.dataset != FIRST_SET):
        sets.setdefault(evaluation.dataset, []).append(evaluation)
    return sets


def pair_samples(before: Evaluation, after: Evaluation) -> list[tuple[EvaluationSample, EvaluationSample]]:
    """The samples that two evaluations have of the same prompts, in the order of the second."""
    earlier = {sample.prompt: sample for sample in before.samples}
    return [(earlier[sample.prompt], sample) for sample in after.samples if sample.prompt in earlier]
