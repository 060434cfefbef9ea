import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slipstream.errors import RunDirectoryError
from slipstream.observe.best import BestPolicy
from slipstream.observe.evaluations import Evaluation, EvaluationSample, EvaluationWriter
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.report import write_report
from slipstream.observe.run_directory import RunDirectory

MakeRun = Callable[..., RunDirectory]
MakeEvaluation = Callable[..., Evaluation]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }} & \"'"


class Page(HTMLParser):
    """The tags, attributes and headings of a page, and whether its tags are balanced."""

    VOID = frozenset({"meta", "br", "use"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(self.html)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attributes)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("h1", "h2", "h3") and data.strip():
            self.headings.append(data.strip())


def test_the_report_of_an_rl_run_shows_all_there_is_to_see(make_run: MakeRun) -> None:
    run = make_run("run")
    run.write_summary({"accuracy_before": 0.46, "accuracy_after": 0.888, "seconds": 431.2})
    path = write_report(run.path)
    assert path == run.path / "report.html"
    page = Page(path)
    assert {
        "Reinforcement learning: run",
        "Configuration",
        "Held-out accuracy, 256 prompts",
        "What became of the prompts",
        "Reward",
        "Held-out accuracy",
        "Response length",
        "KL and mismatch",
        "Gradient norm",
        "Learning rate",
        "Phase times",
        "Sample answers",
    } <= set(page.headings)
    for shown in ("finished", "46.0%", "+42.8 points", "7 min 11 s", "80 of 80", "filtered: constant reward"):
        assert shown in page.html
    assert "What is 48 + 63?" in page.html
    assert re.search(r"before</span>.*?101.*?after</span>.*?111", page.html, re.DOTALL)
    phases = page.html[page.html.index("<h3>Phase times") :]
    assert re.search("generate.*score.*train.*publish", phases[: phases.index("</figure>")], re.DOTALL)


def chart(page: Page, title: str) -> str:
    """The picture below a heading."""
    picture = page.html[page.html.index(f"<h3>{title}</h3>") :]
    return picture[: picture.index("</figure>")]


def test_evaluations_are_drawn_over_steps_with_the_policy_version_of_each(
    make_run: MakeRun, make_evaluation: MakeEvaluation
) -> None:
    run = make_run("run")
    run.evaluations_path.unlink()
    writer = EvaluationWriter(run.evaluations_path)
    for step in (0, 20, 40):
        for dataset in ("held-out", "math"):
            writer.write(make_evaluation(step, 0.4 + step / 100, policy_version=2 * step, dataset=dataset))
    page = Page(write_report(run.path))
    for name in ("Held-out", "math:"):
        assert f"{name} accuracy, 256 prompts" in page.headings
        for title in ("accuracy", "pass@k", "reward", "response length", "cut at the limit"):
            picture = chart(page, f"{name} {title}")
            assert all(re.search(f">{mark}<", picture) for mark in ("20", "v40", "40", "v80")), title
        assert re.search(">pass@2<", chart(page, f"{name} pass@k"))
    assert "before: step 0 (policy version 0), after: step 40 (policy version 80)" in page.html


def test_the_parts_of_the_reward_have_a_curve_each(make_run: MakeRun) -> None:
    picture = chart(Page(write_report(make_run("run").path)), "Reward parts")
    assert ">correct<" in picture and ">format<" in picture


def test_the_best_policy_is_named_with_its_step(make_run: MakeRun) -> None:
    run = make_run("run")
    policy = BestPolicy(run, "greedy_accuracy")
    best = policy.improved(40, 39, metrics={"greedy_accuracy": 0.875})
    assert best is not None
    policy.keep(best, lambda folder: None)
    html = write_report(run.path).read_text()
    assert "Best greedy_accuracy" in html and "0.875" in html and "step 40, policy version 39" in html


def test_the_report_needs_nothing_from_outside(make_run: MakeRun) -> None:
    page = Page(write_report(make_run("run").path))
    assert page.addresses and all(address.startswith("#") for address in page.addresses)
    assert "://" not in page.html
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"@import|url\((?!#)", page.html)


def test_model_text_is_shown_as_text(make_run: MakeRun, make_evaluation: MakeEvaluation) -> None:
    run = make_run("run")
    writer = EvaluationWriter(run.evaluations_path)
    sample = EvaluationSample(prompt="What is 48 + 63?", label=HOSTILE, response=HOSTILE, reward=0.0)
    writer.write(make_evaluation(80, 0.5, samples=[sample]))
    page = Page(write_report(run.path))
    assert "script" not in page.tags and "img" not in page.tags
    assert page.html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2
    assert "{{ 7 * 7 }}" in page.html, "text is not a template either"


def test_hostile_names_in_configuration_and_metrics_are_text(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", f"steps: 2\nmodel: {{path: '{HOSTILE[:25]}'}}\n", "rl") as run:
        MetricsWriter(run.metrics_path).write(1, 1, metrics={f"time/{HOSTILE}": 1.0, "time/train": 1.0})
        page = Page(write_report(run.path))
    assert "script" not in page.tags and "img" not in page.tags


def test_a_run_that_has_just_started_has_a_report(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "steps: 5\n", "rl") as run:
        page = Page(write_report(run.path))
        assert "No metrics yet." in page.html and ">running<" in page.html
    assert ">unfinished<" in Page(write_report(run.path)).html


def test_the_bottleneck_is_named_in_words_and_staleness_is_drawn(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "steps: 5\n", "rl") as run:
        writer = MetricsWriter(run.metrics_path)
        for step in (1, 2):
            line = {"time/step": 2.0, "idle/learner": 0.75, "idle/reward_engine": 0.05}
            writer.write(step, step, metrics=line | {"staleness/mean": 0.5, "staleness/max": 1.0})
        page = Page(write_report(run.path))
    text = "The reward engine was the bottleneck: busy 95% of the time, 70 points more than the next (the learner 25%)."
    assert text in page.html
    assert "Staleness" in page.headings


def test_a_killed_run_with_half_lines_has_a_report(make_run: MakeRun) -> None:
    run = make_run("run")
    for path in (run.metrics_path, run.evaluations_path, run.ledger_path):
        with path.open("a") as stream:
            stream.write('{"step": 81, "re')
    assert "80 of 80" in write_report(run.path).read_text()


def test_an_sft_run_shows_its_loss_curves(make_run: MakeRun, fill_sft: Callable[[Path], RunDirectory]) -> None:
    page = Page(write_report(make_run("run", fill_sft).path))
    assert {"Supervised fine-tuning: run", "Loss", "Gradient norm", "Learning rate", "Phase times"} <= set(
        page.headings
    )
    assert "held out" in page.html
    assert not {"Reward", "Sample answers", "What became of the prompts"} & set(page.headings)


def test_an_evaluation_shows_its_result_and_answers_without_a_before(
    tmp_path: Path, make_evaluation: MakeEvaluation
) -> None:
    with RunDirectory.create(tmp_path / "run", "seed: 1\n", "evaluate") as run:
        sample = EvaluationSample("2 + 2?", 4, "5", None)
        result = make_evaluation(0, 0.25, greedy_accuracy=0.5, truncated_share=0.1, prompts=64, samples=[sample])
        EvaluationWriter(run.evaluations_path).write(result)
        page = Page(write_report(run.path))
    assert {"Evaluation: run", "Held-out accuracy, 64 prompts", "Sample answers"} <= set(page.headings)
    for shown in ("25.0%", "50.0%", "10.0%", "pass@2", "55.0%", "not scored", "result"):
        assert shown in page.html
    assert "before" not in page.html and "No metrics yet" not in page.html


def test_a_pipeline_report_combines_its_stages(
    tmp_path: Path, make_run: MakeRun, fill_sft: Callable[[Path], RunDirectory]
) -> None:
    with RunDirectory.create(tmp_path / "pipeline", "seed: 1\n", "pipeline") as pipeline:
        assert "No stage has started yet." in write_report(pipeline.path).read_text()
        make_run("pipeline/sft", fill_sft)
        assert "Reinforcement learning" not in Page(write_report(pipeline.path)).headings
        make_run("pipeline/rl").write_summary({})
        page = Page(write_report(pipeline.path))
    headings = page.headings
    assert headings.index("Supervised fine-tuning") < headings.index("Loss") < headings.index("Reinforcement learning")
    assert headings.index("Reinforcement learning") < headings.index("Reward")
    assert "SFT steps" in page.html and "RL steps" in page.html and "from 46.0%" in page.html


def test_values_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "steps: 5\n", "sft") as run:
        writer = MetricsWriter(run.metrics_path)
        for step, loss in enumerate((3.0, float("nan"), float("inf"), 2.0), start=1):
            writer.write(step, 0, metrics={"loss": loss})
        page = Page(write_report(run.path))
    assert "Loss" in page.headings and "4 of 5" in page.html


def test_a_long_run_is_drawn_quickly_and_stays_small(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "steps: 20000\n", "sft") as run:
        run.metrics_path.write_text(
            "".join(f'{{"step": {s}, "policy_version": 0, "loss": 1.5}}\n' for s in range(20_000))
        )
        write_report(run.path)  # Imports are not what is measured.
        started = time.monotonic()
        path = write_report(run.path)
    assert time.monotonic() - started < 10
    assert path.stat().st_size < 1 << 20


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write_report(tmp_path)
