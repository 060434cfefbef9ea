"""The best policy so far, by a metric of the evaluations: `best.json` says which one, `export-best/` holds it.

The order on disk makes a kill at any moment harmless: the checkpoint of the step is complete first, then the export is
put in place, then `best.json` names both, and only then may the checkpoint of the previous best go. A run that was
killed in between is resumed from that very checkpoint, and keeps the policy again.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.observe.checkpoints import checkpoint_name
from slipstream.observe.files import recover_folder, replace_folder, write_json_atomically
from slipstream.observe.run_directory import RunDirectory


@dataclass(frozen=True)
class Best:
    """A policy that is better than all that were evaluated before it.

    `checkpoint` is its path below the run directory; None at step 0, where a run that starts again begins anyway.
    """

    step: int
    policy_version: int
    metric: str
    value: float
    checkpoint: str | None


class BestPolicy:
    """Keeps the policy with the highest value of `metric`; with None it keeps nothing."""

    def __init__(self, directory: RunDirectory, metric: str | None) -> None:
        self.metric = metric
        self._directory = directory
        self.best = read_best(directory.best_path)
        recover_folder(directory.best_export_folder)

    def improved(self, step: int, policy_version: int, *, metrics: Mapping[str, float]) -> Best | None:
        """What the metrics of an evaluation make the best policy; None if they are no better than the best so far.

        The first of several equal ones is the best. An evaluation may lack the metric: pass@k has no value where the
        reward of too many answers failed.
        """
        value = None if self.metric is None else metrics.get(self.metric)
        if self.metric is None or value is None or (self.best is not None and value <= self.best.value):
            return None
        checkpoint = f"{self._directory.checkpoints_folder.name}/{checkpoint_name(step)}" if step else None
        return Best(step, policy_version, self.metric, value, checkpoint)

    def keep(self, best: Best, export: Callable[[Path], None]) -> None:
        """Have `export` write the policy, and declare it the best. Its checkpoint has to be complete.

        If anything fails, the previous best stays as it is. Raises TrainingError if the disk is full.
        """
        replace_folder(self._directory.best_export_folder, export)
        write_json_atomically(self._directory.best_path, asdict(best))
        self.best = best

    def forget_after(self, step: int) -> None:
        """Drop a best policy of a later step, when a run is resumed from the checkpoint of `step` and repeats it."""
        if self.best is None or self.best.step <= step:
            return
        self._directory.best_path.unlink()
        shutil.rmtree(self._directory.best_export_folder, ignore_errors=True)
        self.best = None


def read_best(path: Path) -> Best | None:
    """What a `best.json` says; None if there is none."""
    return Best(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
