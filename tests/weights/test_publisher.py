"""The publisher's comparisons: what it takes for an engine to hold, and compute with, the trainer's weights."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.cluster.calls import EngineState
from slipstream.errors import WeightSyncError
from slipstream.weights import publisher as publisher_module
from slipstream.weights.publisher import WeightPublisher, compare_checksums, probe_sequence


def test_equal_checksums_pass() -> None:
    compare_checksums({"a": 1, "b": 2}, {"b": 2, "a": 1}, "rollout engine 0")


@pytest.mark.parametrize(
    "received, words",
    [({"a": 1}, "did not receive weight 'b'"), ({"a": 1, "b": 3}, "'b' damaged"), ({"a": 1, "b": 2, "c": 0}, "'c'")],
)
def test_a_difference_names_the_engine_and_the_tensor(received: dict[str, int], words: str) -> None:
    with pytest.raises(WeightSyncError, match="rollout engine 1") as caught:
        compare_checksums({"a": 1, "b": 2}, received, "rollout engine 1")
    assert words in str(caught.value)


def test_the_probe_is_fixed_and_within_the_vocabulary() -> None:
    for size in (16, 320, 49152):
        tokens = probe_sequence(size)
        assert tokens.min() >= 0 and tokens.max() < size
        assert tokens.tolist() == probe_sequence(size).tolist()
        assert len(set(tokens.tolist())) > 6


# ---------------------------------------------------------------- the sequence of calls, with engines that are told


class Answering:
    """Stands for a `RemoteEngine`: answers at once what it was told to, and notes what it was asked."""

    state = EngineState.READY
    incarnation = 0

    def __init__(self, name: str, journal: list[str], **answers: Any) -> None:
        self.name = name
        self.journal = journal
        self.answers = answers

    def submit(self, method: str, *arguments: Any) -> Any:
        self.journal.append(f"{self.name}: {method}")
        return self.answers.get(method)


class Plan:
    buckets = ("first", "second")
    total_bytes = 100

    def __init__(self, *, both_sides: bool) -> None:
        self.channel = type("Channel", (), {"needs_both_sides": both_sides})


PROBE = np.array([-1.0, -2.0], np.float32)


def make_publisher(
    monkeypatch: pytest.MonkeyPatch, *, both_sides: bool = False, checksums: Any = None, probe: Any = PROBE,
    dtype: str = "float32", verify: bool = True,
) -> tuple[WeightPublisher, list[str]]:  # fmt: skip
    journal: list[str] = []
    for wait in ("gather", "outcomes"):
        monkeypatch.setattr(publisher_module, wait, lambda calls, deadline_s: list(calls))
    sent = {"weight": 1}
    rank = Answering("rank", journal, fill_bucket=sent, probe=PROBE)
    plan = Plan(both_sides=both_sides)
    learner: Any = SimpleNamespace(ranks=[rank], weight_plan=lambda bucket_bytes, channel: plan)
    learner.submit_fill_bucket = lambda index: [rank.submit("fill_bucket", index)]
    engine: Any = Answering("engine", journal, load_bucket=checksums or [sent], probe=probe)
    restarts: Any = SimpleNamespace(starting=lambda: "", holds_weights=lambda engine, incarnation: None)
    publisher = WeightPublisher(
        learner, [engine], open_channel=lambda receivers: plan.channel, restarts=restarts, bucket_bytes=100,
        verify=verify, dtype=dtype, vocabulary_size=320, call_timeout_s=1.0,
    )  # fmt: skip
    return publisher, journal


@pytest.mark.parametrize("both_sides", [False, True])
def test_engines_pause_take_each_bucket_after_it_was_filled_and_go_on(
    monkeypatch: pytest.MonkeyPatch, both_sides: bool
) -> None:
    publisher, journal = make_publisher(monkeypatch, both_sides=both_sides)
    report = publisher.publish(3)
    assert journal[0] == "engine: begin_update"
    assert journal.index("engine: finish_update") == 5
    assert journal.count("engine: load_bucket") == journal.count("rank: fill_bucket") == 2
    if not both_sides:
        assert journal[1:5] == ["rank: fill_bucket", "engine: load_bucket"] * 2
    assert report.sent_bytes == 100
    assert report.probe_difference == 0.0


def test_a_damaged_weight_stops_the_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, _ = make_publisher(monkeypatch, checksums=[{"weight": 2}])
    with pytest.raises(WeightSyncError, match="'weight' damaged"):
        publisher.publish(1)


def test_every_worker_of_an_engine_is_compared_and_the_one_that_differs_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher, _ = make_publisher(monkeypatch, checksums=[{"weight": 1}, {"weight": 2}])
    with pytest.raises(WeightSyncError, match=r"^engine, worker 1 received weight 'weight' damaged"):
        publisher.publish(1)


@pytest.mark.parametrize("probe", [PROBE + 2e-4, np.array([np.nan, -2.0], np.float32)])
def test_an_engine_that_computes_something_else_stops_the_publish(monkeypatch: pytest.MonkeyPatch, probe: Any) -> None:
    publisher, _ = make_publisher(monkeypatch, probe=probe)
    with pytest.raises(WeightSyncError, match="engine does not compute with the trainer's weights of version 7"):
        publisher.publish(7)


def test_bfloat16_may_differ_by_its_own_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, _ = make_publisher(monkeypatch, probe=PROBE + 0.05, dtype="bfloat16")
    assert publisher.publish(1).probe_difference == pytest.approx(0.05, rel=1e-4)


def test_without_verification_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, journal = make_publisher(monkeypatch, checksums=[{"weight": 2}], probe=PROBE + 1, verify=False)
    assert np.isnan(publisher.publish(1).probe_difference)
    assert not any("probe" in entry for entry in journal)
