"""A thread is held between two of its steps, and only there."""

import threading
import time
from collections.abc import Iterator

import pytest

from slipstream.errors import WeightSyncError
from slipstream.rollout.step_gate import StepGate

WAIT_S = 10.0


class Steps:
    """A thread that takes steps through a gate until it is told to end, or the gate raises."""

    def __init__(self, gate: StepGate) -> None:
        self.gate = gate
        self.count = 0
        self.is_inside = False
        self.error: Exception | None = None
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.gate.running():
                while not self.ending.is_set():
                    self.is_inside = True
                    time.sleep(0.002)
                    self.is_inside = False
                    self.count += 1
                    self.gate.pause()
        except WeightSyncError as error:
            self.error = error

    def wait_for_more(self) -> None:
        before, deadline = self.count, time.monotonic() + WAIT_S
        while self.count == before:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def end(self) -> None:
        self.ending.set()
        self.gate.let_go()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def steps(gate: StepGate) -> Iterator[Steps]:
    steps = Steps(gate)
    yield steps
    steps.end()


def test_a_held_thread_takes_no_step_and_goes_on_when_let_go(gate: StepGate, steps: Steps) -> None:
    for _ in range(3):
        steps.wait_for_more()
        gate.hold()
        assert not steps.is_inside
        count = steps.count
        time.sleep(0.02)
        assert steps.count == count
        gate.let_go()
        steps.wait_for_more()


def test_holding_returns_at_once_where_nothing_runs_and_twice_is_once(gate: StepGate) -> None:
    gate.hold()
    gate.hold()
    steps = Steps(gate)
    time.sleep(0.02)
    assert steps.count == 0, "it does not begin while the gate is held"
    gate.let_go()
    steps.wait_for_more()
    steps.end()


def test_a_failure_ends_the_thread_that_was_held(gate: StepGate, steps: Steps) -> None:
    steps.wait_for_more()
    gate.hold()
    gate.let_go("half of the weights came")
    steps.thread.join(WAIT_S)
    assert str(steps.error) == "half of the weights came"
    gate.hold()
    gate.let_go()
    another = Steps(gate)
    another.wait_for_more()
    another.end()
