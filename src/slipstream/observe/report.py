"""`report.html`: a run on one page that needs nothing else, to look at offline or to send to somebody.

Reads a run directory, finished or not, of any workflow, or a pipeline directory whose stages are run directories
inside it. Everything on the page that was written by a model, a dataset or a user is escaped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.evaluation import FIRST_SET
from slipstream.config.pipeline import COMPARED_STAGES, PIPELINE_STAGES
from slipstream.observe.best import Best, read_best
from slipstream.observe.bottleneck import bottleneck_text
from slipstream.observe.charts import Chart, Curve, Histogram, draw
from slipstream.observe.evaluations import Evaluation, EvaluationSample, by_dataset, pair_samples, read_evaluations
from slipstream.observe.files import write_text_atomically
from slipstream.observe.ledger import LedgerBalance, read_balance
from slipstream.observe.metrics import read_metrics
from slipstream.observe.report_engines import engine_charts
from slipstream.observe.report_evaluations import (
    ResultsTable,
    accuracy_charts,
    answer_charts,
    number_text,
    results_table,
    share_text,
)
from slipstream.observe.run_directory import RunDirectory, parse_config
from slipstream.observe.scores import score_histogram

TEMPLATE = "report.html.j2"
SHOWN_SAMPLES = 8
TITLES = {
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "reward-model": "Reward model",
    "preference": "Preference training",
    "evaluate": "Evaluation",
    "generate": "Generation",
    "pipeline": "Pipeline",
}
REWARD_PART_PREFIX = "reward_part/"
PHASE_PREFIX = "time/"
WHOLE_STEP = "time/step"  # Shown only where a step is not divided into phases.
PHASE_ORDER = ("time/generate", "time/score", "time/train", "time/publish")
# Configuration keys of the overview, where a run has them.
OVERVIEW_KEYS = (
    "model.path",
    "data.source",
    "reward.function",
    "reward.model",
    "steps",
    "seed",
    "batch_size",
    "loss",
    "beta",
    "rollout.engine",
    "rollout.groups_per_step",
    "rollout.samples_per_prompt",
    "rollout.max_response_tokens",
    "rollout.max_staleness",
    "algorithm.kl_coefficient",
    "training.learning_rate",
    "training.zero_stage",
    "training.data_parallel",
    "training.sequence_parallel",
    "training.tensor_parallel",
)


@dataclass(frozen=True)
class _CurveChart:
    """A chart of plain metrics: (metric, label) for each curve."""

    title: str
    curves: tuple[tuple[str, str], ...]
    unit: str = ""
    band: str | None = None
    logarithmic: bool = False


METRIC_CHARTS = (
    _CurveChart("Reward", (("reward/mean", "mean"),), band="reward/std"),
    _CurveChart("Loss", (("loss", "training"), ("evaluation/loss", "held out")), unit="nats"),
    _CurveChart("Accuracy", (("accuracy", "training"), ("evaluation/accuracy", "held out")), unit="share"),
    _CurveChart("Scores", (("chosen_score", "better answers"), ("rejected_score", "worse answers"))),
    _CurveChart("Implicit rewards", (("chosen_reward", "better answers"), ("rejected_reward", "worse answers"))),
    _CurveChart("Response length", (("response_length/mean", "mean"),), unit="tokens"),
    _CurveChart(
        "KL and mismatch",
        (("policy/kl", "KL to the reference"), ("policy/mismatch_k3", "rollout against trainer")),
        unit="nats per token",
        logarithmic=True,
    ),
    _CurveChart(
        "Divergence from the teacher",
        (
            ("teacher/reverse_kl", "own answers"),
            ("divergence", "training"),
            ("evaluation/divergence", "held out"),
        ),
        unit="nats per token",
    ),
    _CurveChart("Policy loss", (("policy/loss", "loss"),)),
    _CurveChart("Entropy", (("policy/entropy", "entropy"),), unit="nats per token"),
    _CurveChart("Clipped tokens", (("policy/clip_share", "clipped"),), unit="share"),
    _CurveChart("Gradient norm", (("policy/gradient_norm", "RL"), ("gradient_norm", "supervised"))),
    _CurveChart("Learning rate", (("policy/learning_rate", "RL"), ("learning_rate", "supervised"))),
    _CurveChart("Throughput", (("throughput/tokens_per_s", "tokens/s"),), unit="tokens per second"),
    _CurveChart("Staleness", (("staleness/mean", "mean"), ("staleness/max", "largest")), unit="publishes"),
    _CurveChart("Effective sample size", (("policy/correction_effective_share", "of the tokens"),), unit="share"),
)


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run or pipeline directory and return its path.

    Raises RunDirectoryError if `run_dir` is not one or a file in it cannot be read, TrainingError on a full disk.
    """
    run = RunDirectory.open(run_dir)
    sections = [_section(stage) for stage in _stages(run)]
    environment = run.environment
    page = _template().render(
        title=TITLES.get(run.workflow, run.workflow),
        name=run.path.name,
        path=str(run.path),
        workflow=run.workflow,
        status=_status(run),
        summary=_flat_summary(run.summary or {}),
        tiles=_tiles(run, sections),
        sections=sections,
        config_text=run.config_text,
        starts=environment["starts"],
    )
    path = run.report_path
    write_text_atomically(path, page)
    return path


def _template() -> Any:
    from importlib import resources

    from jinja2 import Environment, StrictUndefined

    # Autoescape for everything: the template's name would not switch it on by itself.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number_text
    return environment.from_string(resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))


def _stages(run: RunDirectory) -> list[RunDirectory]:
    """The run itself, or the stages of a pipeline in their order, as far as they have been started."""
    if run.workflow != "pipeline":
        return [run]
    names = (*PIPELINE_STAGES, *(f"comparison/{name}" for name in COMPARED_STAGES))
    folders = [run.path / name for name in names]
    return [RunDirectory.open(folder) for folder in folders if (folder / "config.yaml").exists()]


@dataclass(frozen=True)
class _Section:
    """What the page shows of one run. `evaluations` are those on the first held-out set."""

    title: str
    workflow: str
    status: str
    overview: list[tuple[str, Any]]
    charts: list[tuple[str, str]]
    results: list[ResultsTable]
    evaluations: list[Evaluation]
    best: Best | None
    samples: list[tuple[EvaluationSample | None, EvaluationSample]]
    ledger: LedgerBalance | None
    bottleneck: str | None
    steps_done: int
    steps_total: int | None
    last: dict[str, Any]


def _section(run: RunDirectory) -> _Section:
    config = parse_config(run.config_text)
    lines = read_metrics(run.path / "metrics.jsonl")
    sets = by_dataset(read_evaluations(run.evaluations_path))
    evaluations = sets.get(FIRST_SET, [])
    ledger = read_balance(run.ledger_path) if run.ledger_path.exists() else None
    steps = config.get("steps")
    return _Section(
        title=TITLES.get(run.workflow, run.workflow),
        workflow=run.workflow,
        status=_status(run),
        overview=[(key, value) for key in OVERVIEW_KEYS if (value := _lookup(config, key)) is not None],
        charts=[(chart.title, draw(chart)) for chart in _pictures(run, lines, sets)],
        results=[results_table(dataset, of_set) for dataset, of_set in sets.items()],
        evaluations=evaluations,
        best=read_best(run.best_path),
        samples=_samples(evaluations),
        ledger=ledger if ledger is not None and ledger.issued else None,
        bottleneck=bottleneck_text(lines),
        steps_done=max((int(line["step"]) for line in lines), default=0),
        steps_total=steps if isinstance(steps, int) else None,
        last=_last_values(lines),
    )


def _pictures(
    run: RunDirectory, lines: Sequence[Mapping[str, Any]], sets: Mapping[str, Sequence[Evaluation]]
) -> list[Chart | Histogram]:
    """All charts, and how the scores of a reward model are spread at its end."""
    histogram = score_histogram(run.scores_path)
    return [*_charts(lines, sets), *([] if histogram is None else [histogram])]


def _charts(lines: Sequence[Mapping[str, Any]], sets: Mapping[str, Sequence[Evaluation]]) -> list[Chart]:
    """All charts that there is data for: reward or loss first, accuracies second."""
    repeated = {dataset: evaluations for dataset, evaluations in sets.items() if len(evaluations) > 1}
    charts = [
        *(_metric_chart(spec, lines) for spec in METRIC_CHARTS[:2]),
        *(chart for dataset, evaluations in repeated.items() for chart in accuracy_charts(dataset, evaluations)),
        _reward_part_chart(lines),
        *(_metric_chart(spec, lines) for spec in METRIC_CHARTS[2:]),
        *(chart for dataset, evaluations in repeated.items() for chart in answer_charts(dataset, evaluations)),
        _phase_chart(lines),
        *engine_charts(lines),
    ]
    return [chart for chart in charts if chart.curves]


def _reward_part_chart(lines: Sequence[Mapping[str, Any]]) -> Chart:
    """The mean of each named part of the reward."""
    names = dict.fromkeys(name for line in lines for name in line if name.startswith(REWARD_PART_PREFIX))
    curves = tuple((name, name.removeprefix(REWARD_PART_PREFIX)) for name in names)
    title = f"Reward part: {curves[0][1]}" if len(curves) == 1 else "Reward parts"
    return _metric_chart(_CurveChart(title, curves), lines)


def _metric_chart(spec: _CurveChart, lines: Sequence[Mapping[str, Any]]) -> Chart:
    curves = []
    for name, label in spec.curves:
        shown = [line for line in lines if _is_number(line.get(name))]
        if not shown:
            continue
        band = None
        if spec.band is not None and all(_is_number(line.get(spec.band)) for line in shown):
            band = [float(line[spec.band]) for line in shown]
        # Held-out values are far between and deserve a mark each.
        markers = name.startswith("evaluation/")
        curves.append(Curve(label, [(line["step"], float(line[name])) for line in shown], band, markers))
    return Chart(spec.title, curves, spec.unit, logarithmic=spec.logarithmic)


def _phase_chart(lines: Sequence[Mapping[str, Any]]) -> Chart:
    """Seconds of each phase on top of each other; a phase that a step did not have took 0 s."""
    names = {name for line in lines for name in line if name.startswith(PHASE_PREFIX)}
    if len(names) > 1:
        names.discard(WHOLE_STEP)
    ordered = [name for name in PHASE_ORDER if name in names] + sorted(names - set(PHASE_ORDER))
    shown = [line for line in lines if any(_is_number(line.get(name)) for name in ordered)]
    curves = [
        Curve(
            name.removeprefix(PHASE_PREFIX),
            [(line["step"], float(line[name]) if _is_number(line.get(name)) else 0.0) for line in shown],
        )
        for name in ordered
    ]
    return Chart("Phase times", curves, "seconds per step", stacked=True)


def _samples(evaluations: Sequence[Evaluation]) -> list[tuple[EvaluationSample | None, EvaluationSample]]:
    """Answers of the first and the last evaluation to the same prompts; of a single evaluation, its answers alone."""
    if not evaluations:
        return []
    if len(evaluations) == 1:
        return [(None, sample) for sample in evaluations[0].samples[:SHOWN_SAMPLES]]
    return list(pair_samples(evaluations[0], evaluations[-1])[:SHOWN_SAMPLES])


def _tiles(run: RunDirectory, sections: Sequence[_Section]) -> list[tuple[str, str, str]]:
    """The few numbers at the top: (label, value, remark)."""
    tiles = []
    evaluations = next((section.evaluations for section in reversed(sections) if section.evaluations), [])
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        for label, before, after in (
            ("Sampled accuracy", first.sampled_accuracy, last.sampled_accuracy),
            ("Greedy accuracy", first.greedy_accuracy, last.greedy_accuracy),
        ):
            tiles.append((label, share_text(after), f"from {share_text(before)}" if len(evaluations) > 1 else ""))
    for section in sections:
        if section.best is not None:
            remark = f"step {section.best.step}, policy version {section.best.policy_version}"
            tiles.append((f"Best {section.best.metric}", number_text(section.best.value), remark))
        done = f"{section.steps_done}" + (f" of {section.steps_total}" if section.steps_total else "")
        if section.workflow != "evaluate":
            tiles.append((f"{section.workflow.upper()} steps", done, ""))
        for name, label in (("reward/mean", "Last reward"), ("loss", "Last loss")):
            if name in section.last:
                tiles.append((label, number_text(section.last[name]), ""))
    seconds = (run.summary or {}).get("seconds", math.nan)
    if _is_number(seconds):
        tiles.append(("Time", _duration(seconds), ""))
    return tiles


def _last_values(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The latest finite value of every metric."""
    last: dict[str, Any] = {}
    for line in lines:
        last |= {name: value for name, value in line.items() if _is_number(value)}
    return last


def _status(run: RunDirectory) -> str:
    if run.finished:
        return "finished"
    return "running" if run.in_use else "unfinished"


def _flat_summary(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in summary.items():
        if isinstance(value, Mapping):
            flat += [(f"{name}.{below}", shown) for below, shown in _flat_summary(value)]
        else:
            flat.append((name, number_text(value) if _is_number(value) else value))
    return flat


def _lookup(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
