"""A run that was interrupted and resumed gives, bit for bit, what one gives that was not."""

import signal
from collections import Counter
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
GROUPS_PER_STEP = 4


def assert_same_run(bench: Any, output: str, undisturbed: Any, undisturbed_output: str) -> None:
    """Metrics, evaluations, samples and ledger are those of the run that nothing disturbed."""
    assert bench.metrics(output) == undisturbed.metrics(undisturbed_output)
    assert bench.evaluations(output) == undisturbed.evaluations(undisturbed_output)
    assert bench.rollouts(output) == undisturbed.rollouts(undisturbed_output)
    ledger = bench.events(output)
    issued = Counter(event["group"] for event in ledger if event["event"] == "issued")
    assert len(issued) == STEPS * GROUPS_PER_STEP
    assert set(issued.values()) == {1}, "a prompt was drawn twice"
    expected = undisturbed.events(undisturbed_output)
    assert Counter(map(str, ledger)) == Counter(map(str, expected))


def test_a_run_stopped_by_control_c_while_it_generates_goes_on_bit_for_bit(bench: Any, finished_run: Any) -> None:
    undisturbed, _ = finished_run
    process = bench.start("rl", "run", bench.evaluated_settings())
    bench.hang_in_step(process, "run", 4)
    process.interrupt(group=True)

    assert process.finish(limit_s=20) == 130
    assert process.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in process.stderr
    assert process.survivors(limit_s=10) == []
    assert process.remains() == []

    bench.release()
    bench.resume("run")
    assert_same_run(bench, "run", undisturbed, "run")


def test_a_run_stopped_by_its_reward_goes_on_bit_for_bit_even_past_a_damaged_checkpoint(
    bench: Any, finished_run: Any
) -> None:
    undisturbed, _ = finished_run
    process = bench.start("rl", "run", bench.evaluated_settings(reward__on_failure="stop"))
    bench.wait_for_step(process, "run", 4)
    (bench.control / "raise").touch()

    assert process.finish() == 1
    assert "asked to fail" in process.stderr and "reward.on_failure" in process.stderr
    assert "Traceback" not in process.stderr
    assert process.survivors(limit_s=10) == []
    assert process.remains() == []

    newest = max((bench.folder / "run/checkpoints").iterdir())
    assert newest.name == "step-000004"
    weights = max(newest.rglob("*.pt"), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1])
    resumed = bench.resume("run")
    assert "step-000004 is damaged" in resumed.stderr + resumed.stdout
    assert_same_run(bench, "run", undisturbed, "run")


def test_a_run_whose_controller_was_killed_goes_on_bit_for_bit_with_vllm(bench: Any, finished_vllm_run: Any) -> None:
    """With PPO: critic, KL control, renewed reference and reward moments go on where they were."""
    undisturbed, _ = finished_vllm_run
    process = bench.start("rl", "run", bench.remembering_settings())
    bench.hang_in_step(process, "run", 4)
    process.popen.send_signal(signal.SIGKILL)
    process.popen.wait()

    assert process.survivors(limit_s=15) == []
    assert process.remains() == [], "the watchdog outlives the controller"

    bench.release()
    bench.resume("run")
    assert_same_run(bench, "run", undisturbed, "run")
