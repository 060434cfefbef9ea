"""What the policy answers on held-out prompts: `evaluations.jsonl`, one line an evaluation.

The workflow writes the lines, the report shows the first beside the last. Step 0 is the policy before training.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    """The result of one evaluation. Accuracies are shares in [0, 1]; lengths are in tokens.

    `truncated_share` is the share of sampled responses that were cut at the length limit; `prompts` counts the
    held-out prompts, `samples` holds a few of the sampled answers, the same prompts each time.
    """

    step: int
    policy_version: int
    sampled_accuracy: float
    greedy_accuracy: float
    prompts: int
    mean_length: float
    truncated_share: float
    samples: list[EvaluationSample] = field(default_factory=list)


class EvaluationWriter:
    """Appends to `evaluations.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path)

    def write(self, evaluation: Evaluation) -> None:
        """Append one evaluation. Raises TrainingError if the disk is full."""
        self._file.write(asdict(evaluation))

    def truncate_after(self, step: int) -> None:
        """Drop evaluations of later steps, when a run is resumed from the checkpoint of `step`."""
        self._file.truncate_after(step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_evaluations(path: Path) -> list[Evaluation]:
    """All evaluations of a run, in order; none if there is no such file."""
    return [
        Evaluation(**{**line, "samples": [EvaluationSample(**sample) for sample in line["samples"]]})
        for line in read_json_lines(path)
    ]


def pair_samples(before: Evaluation, after: Evaluation) -> list[tuple[EvaluationSample, EvaluationSample]]:
    """The samples that two evaluations have of the same prompts, in the order of the second."""
    earlier = {sample.prompt: sample for sample in before.samples}
    return [(earlier[sample.prompt], sample) for sample in after.samples if sample.prompt in earlier]
