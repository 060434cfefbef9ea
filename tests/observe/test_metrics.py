import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.observe.metrics import MetricsWriter, deterministic_part, read_metrics

names = st.text(min_size=1).filter(lambda name: name not in ("step", "policy_version", "non_finite"))


@given(metrics=st.dictionaries(names, st.floats() | st.integers(-(2**63), 2**63)))
def test_every_number_comes_back_with_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float]
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    MetricsWriter(path).write(3, 2, metrics=metrics)
    (line,) = read_metrics(path)
    assert (line.pop("step"), line.pop("policy_version")) == (3, 2)
    assert line.keys() == metrics.keys()
    for name, value in metrics.items():
        assert type(line[name]) is type(value)
        if isinstance(value, float) and not math.isnan(value):
            assert struct.pack("d", line[name]) == struct.pack("d", value)
        elif isinstance(value, float):
            assert math.isnan(line[name])
        else:
            assert line[name] == value


def test_the_file_is_strict_json_and_names_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(1, 0, metrics={"a": math.nan, "b": -math.inf, "c": 1.5})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line == {
        "step": 1,
        "policy_version": 0,
        "a": None,
        "b": None,
        "c": 1.5,
        "non_finite": {"a": "nan", "b": "-inf"},
    }


def test_numpy_numbers_are_written_with_their_own_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(1, 0, metrics={"a": np.float32(0.1), "b": np.int64(7), "c": True})
    (line,) = read_metrics(path)
    assert (line["a"], line["b"], line["c"]) == (float(np.float32(0.1)), 7, 1)


@pytest.mark.parametrize("value", ["0.5", None, [1.0]])
def test_what_is_not_a_number_is_refused_by_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="reward/mean"):
        MetricsWriter(tmp_path / "metrics.jsonl").write(1, 0, metrics={"reward/mean": value})  # type: ignore[dict-item]


def test_reserved_names_and_steps_that_go_back_are_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(2, 2, metrics={})
    with pytest.raises(ValueError, match="reserved"):
        writer.write(3, 3, metrics={"step": 1})
    with pytest.raises(ValueError, match="step 1 come after those of step 2"):
        writer.write(1, 1, metrics={})


def test_a_resumed_run_rewrites_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 6):
        writer.write(step, step, metrics={"x": step / 10})
    writer.close()
    with path.open("a") as stream:
        stream.write('{"step": 6, "x"')  # The process was killed here.
    resumed = MetricsWriter(path)
    resumed.truncate_after(3)
    resumed.write(4, 4, metrics={"x": 0.4})
    assert [(line["step"], line["x"]) for line in read_metrics(path)] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_the_deterministic_part_has_no_clock_and_no_memory() -> None:
    line = {
        "step": 1,
        "policy_version": 1,
        "reward/mean": 0.5,
        "time/train": 1.0,
        "throughput/tokens_per_s": 9.0,
        "memory/learner_bytes": 5,
        "timeouts": 0,
    }
    assert deterministic_part(line) == {"step": 1, "policy_version": 1, "reward/mean": 0.5, "timeouts": 0}
