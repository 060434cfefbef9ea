"""What a person sees while a run goes on: a progress bar, one line per step, and tables at the end.

With a terminal the bar stays below the lines; without one (a file, a pipe) the same lines come out plain. Text made by
a model is hostile: its control characters are shown, not obeyed, and it is never read as markup.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from slipstream.observe.evaluations import Evaluation, EvaluationSample, pair_samples

PLAIN_WIDTH = 110
SHOWN_TEXT = 160
SHOWN_SAMPLES = 4
PHASE_PREFIX = "time/"
# Labels of the step line, the metric each shows, and its format.
STEP_FIELDS = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "loss", ".4f"),
    ("held-out loss", "evaluation/loss", ".4f"),
    ("accuracy", "accuracy", ".3f"),
    ("held-out accuracy", "evaluation/accuracy", ".3f"),
    ("KL", "policy/kl", ".4f"),
    ("mismatch", "policy/mismatch_k3", ".1e"),
    ("length", "response_length/mean", ".1f"),
    ("tokens/s", "throughput/tokens_per_s", ",.0f"),
)


class RunConsole:
    """Prints to `stream` (standard output unless given), or nothing at all if `quiet`."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        from rich.console import Console

        self._console = Console(file=stream, quiet=quiet, highlight=False, markup=False, emoji=False)
        if not self._console.is_terminal:
            self._console = Console(
                file=stream, quiet=quiet, highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH, no_color=True
            )
        self._progress: Any = None
        self._task: Any = None

    def line(self, text: str) -> None:
        """One line, never wrapped."""
        self._console.print(visible(text), soft_wrap=True)

    @contextlib.contextmanager
    def phase(self, description: str) -> Iterator[None]:
        """A long wait outside of the steps, such as the start of an engine: says what is waited for and how long."""
        from rich.text import Text

        started = time.monotonic()
        if self._console.is_terminal and self._progress is None:
            with self._console.status(Text(visible(description))):
                yield
        else:
            self.line(f"{description} ...")
            yield
        self.line(f"{description}: {time.monotonic() - started:.1f} s")

    @contextlib.contextmanager
    def progress(self, description: str, total: int, *, completed: int = 0) -> Iterator[None]:
        """Show a bar of `total` steps during the block, of which `completed` are done (a resumed run)."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as self._progress:
            self._task = self._progress.add_task(visible(description), total=total, completed=completed)
            try:
                yield
            finally:
                self._progress = None

    def step(self, step: int, total: int, *, metrics: Mapping[str, Any]) -> None:
        """The line of a finished step; moves the bar if one is shown."""
        self.line(step_line(step, total, metrics=metrics))
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """The line of an evaluation on one held-out set."""
        self.line(evaluation_line(evaluation))

    def accuracy_table(self, compared: Sequence[tuple[Evaluation, Evaluation]]) -> None:
        """Accuracy before and after training, sampled and greedy, of each held-out set; the first one leads."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"Held-out accuracy ({compared[0][1].prompts} prompts)")
        table.add_column("")
        for heading in ("before", "after", "gain"):
            table.add_column(heading, justify="right")
        for position, (before, after) in enumerate(compared):
            of_set = f" ({after.dataset}, {after.prompts} prompts)" if position else ""
            for label, first, last in (
                ("sampled", before.sampled_accuracy, after.sampled_accuracy),
                ("greedy", before.greedy_accuracy, after.greedy_accuracy),
            ):
                cells = (f"{label}{of_set}", f"{first:.1%}", f"{last:.1%}", f"{last - first:+.1%}")
                table.add_row(*(Text(cell) for cell in cells))
        self._console.print(table)

    def samples_table(self, before: Evaluation, after: Evaluation) -> None:
        """A few held-out prompts with the sampled answer before and after training."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Sample answers", show_lines=True)
        for heading in ("prompt", "label", "before", "after"):
            table.add_column(heading, overflow="fold")
        for first, last in pair_samples(before, after)[:SHOWN_SAMPLES]:
            cells = (last.prompt, str(last.label), _answer(first), _answer(last))
            table.add_row(*(Text(visible(cell)) for cell in cells))
        self._console.print(table)


def evaluation_line(evaluation: Evaluation) -> str:
    """`held-out accuracy after step 20: sampled 81.4%, greedy 93.4%, pass@4 97.2%`, with the largest k there is."""
    shown = {"sampled": evaluation.sampled_accuracy, "greedy": evaluation.greedy_accuracy}
    shown |= dict(list(evaluation.pass_at_k.items())[1:][-1:])
    accuracies = ", ".join(f"{name} {value:.1%}" for name, value in shown.items())
    unscored = f" ({evaluation.unscored} answers not scored)" if evaluation.unscored else ""
    return f"{evaluation.dataset} accuracy after step {evaluation.step}: {accuracies}{unscored}"


def step_line(step: int, total: int, *, metrics: Mapping[str, Any]) -> str:
    """`step  3/80 | reward 0.512 | ... | generate 0.8 s, train 0.6 s`, of the metrics that there are."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    parts += [f"{label} {metrics[name]:{form}}" for label, name, form in STEP_FIELDS if metrics.get(name) is not None]
    phases = [
        f"{name.removeprefix(PHASE_PREFIX)} {value:.2f} s"
        for name, value in metrics.items()
        if name.startswith(PHASE_PREFIX) and value is not None
    ]
    if phases:
        parts.append(", ".join(phases))
    return " | ".join(parts)


def visible(text: str) -> str:
    """Text whose control characters (terminal commands among them) are spelled out, except line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else json.dumps(c)[1:-1] for c in text)


def _answer(sample: EvaluationSample) -> str:
    text = sample.response if len(sample.response) <= SHOWN_TEXT else sample.response[:SHOWN_TEXT] + " ..."
    reward = "not scored" if sample.reward is None else f"reward {sample.reward:g}"
    return f"{text}\n({reward})"
