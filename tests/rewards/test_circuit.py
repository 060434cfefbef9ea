"""The circuit breaker, against a clock that the test turns."""

from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.circuit import FAILURES_TO_OPEN, OPEN_S, Circuit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def broken(clock: Clock) -> Circuit:
    circuit = Circuit(clock)
    for _ in range(FAILURES_TO_OPEN):
        assert circuit.admit()
        circuit.failure()
    return circuit


def test_failures_in_a_row_leave_an_address_out_and_one_success_between_them_does_not():
    circuit = Circuit(Clock())
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            circuit.failure()
        assert circuit.admit()
        circuit.success()
    assert not circuit.is_open
    assert broken(Clock()).is_open
    assert not broken(Clock()).admit()


def test_after_a_while_one_call_probes_and_decides():
    clock = Clock()
    circuit = broken(clock)
    clock.now += OPEN_S - 0.1
    assert not circuit.admit()
    clock.now += 0.1
    assert circuit.admit()
    assert not circuit.admit(), "one probe at a time"
    circuit.failure()
    assert not circuit.admit()
    clock.now += OPEN_S
    assert circuit.admit()
    circuit.success()
    assert circuit.admit() and circuit.admit()


def test_a_probe_that_was_given_up_lets_another_one_go():
    clock = Clock()
    circuit = broken(clock)
    clock.now += OPEN_S
    assert circuit.admit()
    circuit.release()
    assert circuit.admit()


@given(st.lists(st.sampled_from(["success", "failure", "release", "wait"]), max_size=40))
def test_it_never_stays_shut_for_good(events):
    clock = Clock()
    circuit = Circuit(clock)
    for event in events:
        if event == "wait":
            clock.now += OPEN_S / 2
        elif circuit.admit():
            getattr(circuit, event)()
    clock.now += OPEN_S
    assert circuit.admit()
