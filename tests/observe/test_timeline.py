import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.observe.timeline import Timeline, read_timeline


def spans(path: Path) -> list[dict]:
    return [event for event in read_timeline(path) if event["ph"] == "X"]


def lane_names(path: Path) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in read_timeline(path) if event["name"] == "process_name"}


def test_each_engine_has_a_named_lane_and_times_are_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    start = time.time() + 1
    timeline.add("rollout 0", "generate", start=start, end=start + 0.25, arguments={"step": 1})
    timeline.add("learner", "train", start=start + 0.25, end=start + 0.5)
    timeline.close()
    events = json.loads(path.read_text())
    generate, train = (event for event in events if event["ph"] == "X")
    assert lane_names(path) == {generate["pid"]: "rollout 0", train["pid"]: "learner"}
    assert generate["pid"] != train["pid"]
    assert generate["dur"] == pytest.approx(250_000, abs=1)
    assert train["ts"] - generate["ts"] == pytest.approx(250_000, abs=1)
    assert 900_000 < generate["ts"] < 1_100_000, "counted from the start of the run"
    assert generate["args"] == {"step": 1}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert threads == {(generate["pid"], generate["tid"]), (train["pid"], train["tid"])}


def test_a_span_is_recorded_also_when_its_block_raises(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    with pytest.raises(KeyError), timeline.span("controller", "step", step=4):
        time.sleep(0.02)
        raise KeyError
    (span,) = spans(tmp_path / "timeline.json")
    assert span["dur"] >= 20_000
    assert span["args"] == {"step": 4}


def test_a_span_that_ends_before_it_starts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="before it starts"):
        Timeline(tmp_path / "timeline.json").add("learner", "train", start=2.0, end=1.0)


@given(
    times=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=25),
    in_order_of_ends=st.booleans(),
)
def test_spans_of_one_row_are_apart_or_nested(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[int, int]], in_order_of_ends: bool
) -> None:
    path = tmp_path_factory.mktemp("timeline") / "timeline.json"
    timeline = Timeline(path)
    base = time.time()
    intervals = [(start, start + length) for start, length in times]
    for start, end in sorted(intervals, key=lambda i: i[1]) if in_order_of_ends else intervals:
        timeline.add("rollout 0", "request", start=base + start, end=base + end)
    assert len(spans(path)) == len(times)
    rows: dict[int, list[tuple[int, int]]] = {}
    for span in spans(path):
        start, length = round(span["ts"] / 1e6), round(span["dur"] / 1e6)
        rows.setdefault(span["tid"], []).append((start, start + length))
    for row in rows.values():
        for (s1, e1), (s2, e2) in combinations(row, 2):
            apart = e1 <= s2 or e2 <= s1
            nested = (s1 <= s2 and e2 <= e1) or (s2 <= s1 and e1 <= e2)
            assert apart or nested


def test_sequential_and_nested_spans_stay_in_one_row(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    with timeline.span("controller", "step"):
        for name in ("generate", "train"):
            with timeline.span("controller", name):
                time.sleep(0.002)
    assert [span["tid"] for span in spans(path)] == [0, 0, 0]


@pytest.mark.parametrize("closed", [True, False])
def test_a_resumed_run_goes_on_in_the_same_lanes_and_the_same_time(tmp_path: Path, closed: bool) -> None:
    path = tmp_path / "timeline.json"
    first = Timeline(path)
    now = time.time()
    first.add("learner", "train", start=now, end=now + 1)
    if closed:
        first.close()
    else:
        with path.open("a") as stream:
            stream.write('{"ph": "X", "na')  # Killed while writing.
    second = Timeline(path)
    second.add("learner", "train", start=now + 5, end=now + 6)
    second.add("rollout 0", "generate", start=now + 6, end=now + 7)
    second.close()
    json.loads(path.read_text())
    one, two, three = spans(path)
    assert two["ts"] - one["ts"] == pytest.approx(5e6, abs=1)
    assert lane_names(path) == {one["pid"]: "learner", three["pid"]: "rollout 0"}
    assert two["pid"] == one["pid"] and two["tid"] == one["tid"]


def test_a_killed_run_leaves_an_array_that_only_lacks_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    script = (
        "import sys; from pathlib import Path; from slipstream.observe.timeline import Timeline\n"
        "timeline = Timeline(Path(sys.argv[1]))\n"
        "for _ in range(3):\n    with timeline.span('learner', 'train'): pass\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    text = path.read_text()
    assert text.endswith(",\n")
    assert len([e for e in json.loads(text.rstrip(",\n") + "]") if e["ph"] == "X"]) == 3


def test_several_threads_may_record_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    start = time.time()

    def record(thread: int) -> None:
        for number in range(200):
            timeline.add(f"lane {number % 7}", f"{thread}", start=start + number, end=start + number + 0.5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(record, range(8)))
    timeline.close()
    assert len([event for event in json.loads(path.read_text()) if event["ph"] == "X"]) == 8 * 200
    assert sorted(lane_names(path).values()) == [f"lane {lane}" for lane in range(7)]
