"""The filter of system calls: that it is well formed. What it refuses is tried in test_sandbox.py."""

import struct

import pytest

from slipstream.rewards.system_calls import REFUSED_CALLS, system_call_filter


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_stays_inside_and_ends_in_an_answer(machine: str) -> None:
    instructions = list(struct.iter_unpack("=HBBI", system_call_filter(machine) or b""))
    assert len(instructions) == 6 + 2 * len(REFUSED_CALLS) + 12
    for place, (code, when_true, when_false, _) in enumerate(instructions):
        if code == 0x06:
            continue
        assert place + 1 + max(when_true, when_false) < len(instructions)
    assert instructions[-1] == (0x06, 0, 0, 0x7FFF0000)


def test_there_is_no_filter_for_a_processor_whose_numbers_are_not_known() -> None:
    assert system_call_filter("riscv64") is None
