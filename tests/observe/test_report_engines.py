"""What is drawn of the engines: idle shares, queues, pauses and the age of the tokens."""

from typing import Any

from slipstream.observe.charts import Chart
from slipstream.observe.report_engines import engine_charts


def line(step: int, **metrics: float) -> dict[str, Any]:
    return {"step": step} | {name.replace("__", "/"): value for name, value in metrics.items()}


def drawn(lines: list[dict[str, Any]]) -> dict[str, Chart]:
    return {chart.title: chart for chart in engine_charts(lines) if chart.curves}


def points(chart: Chart) -> dict[str, list[tuple[float, float]]]:
    return {curve.label: list(curve.points) for curve in chart.curves}


def test_an_asynchronous_run_shows_idle_shares_queues_pauses_and_the_age_of_its_tokens() -> None:
    lines = [
        line(1, idle__learner=0.5, idle__rollout_engine_0=0.1, pause__publish_seconds=0.2, staleness__share__0=1.0,
             queue__groups_generating=3, queue__groups_scoring=0, queue__groups_ready=1),
        line(2, idle__learner=0.4, idle__rollout_engine_0=0.0, pause__publish_seconds=0.3, staleness__share__0=0.25,
             staleness__share__2=0.75, queue__groups_generating=4, queue__groups_scoring=2, queue__groups_ready=0),
    ]  # fmt: skip
    charts = drawn(lines)
    assert points(charts["Idle engines"]) == {"learner": [(1, 0.5), (2, 0.4)], "rollout engine 0": [(1, 0.1), (2, 0.0)]}
    assert points(charts["Queues"]) == {
        "being generated": [(1, 3), (2, 4)],
        "being scored": [(1, 0), (2, 2)],
        "ready": [(1, 1), (2, 0)],
    }
    assert points(charts["Publish pause"]) == {"engines stand still": [(1, 0.2), (2, 0.3)]}
    assert points(charts["Tokens by staleness"]) == {
        "the version that is trained": [(1, 1.0), (2, 0.25)],
        "2 publishes older": [(1, 0.0), (2, 0.75)],
    }


def test_of_many_rollout_engines_the_mean_and_the_idlest_are_drawn() -> None:
    idle = {f"idle__rollout_engine_{number}": number / 100 for number in range(101)}
    chart = drawn([line(1, idle__learner=0.5, **idle)])["Idle engines"]
    assert points(chart) == {
        "learner": [(1, 0.5)],
        "101 rollout engines, mean": [(1, 0.5)],
        "the one idle most": [(1, 1.0)],
    }


def test_what_a_run_does_not_have_is_not_drawn() -> None:
    synchronous = line(1, staleness__share__0=1.0, queue__groups_generating=0, queue__groups_ready=0)
    assert drawn([synchronous]) == {}
    assert drawn([line(1, loss=2.0)]) == {}
