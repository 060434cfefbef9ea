"""An asynchronous run: staleness stays within its bound, work overlaps, and every prompt is trained on exactly once."""

import json
import signal
from collections import Counter
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
GROUPS_PER_STEP = 4
SAMPLES = 4
# A policy with random weights ends about half of its answers before the limit on one of these.
ENDS = [chr(code) for code in range(ord("A"), ord("z") + 1)]


def settings(bench: Any, **changes: Any) -> dict[str, Any]:
    return bench.evaluated_settings(rollout__max_staleness=2) | {
        name.replace("__", "."): value for name, value in changes.items()
    }


@pytest.fixture(scope="module")
def stale_run(make_workbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with staleness 2 that nothing disturbed, whose reward takes a while, and longer for longer answers.

    Its algorithm needs a reference, and learns from each group by itself.
    """
    bench = make_workbench(tmp_path_factory.mktemp("stale"))
    changes = {"reward.options.pause_per_token_s": 0.05, "reward.workers": 8, "rollout.stop": ENDS}
    algorithm = {"algorithm.preset": "dr_grpo", "algorithm.kl_coefficient": 0.01}
    bench.run("rl", "run", settings(bench, **changes, **algorithm))
    return bench


def assert_each_trained_once(bench: Any) -> None:
    """And no prompt was dropped: no more is issued than is trained on."""
    bench.assert_each_trained_once("run", steps=STEPS, groups_per_step=GROUPS_PER_STEP)
    count = STEPS * GROUPS_PER_STEP
    assert Counter(event["event"] for event in bench.events("run")) == {"issued": count, "trained": count}


def test_every_prompt_is_trained_on_once_and_in_the_order_of_issue(stale_run: Any) -> None:
    assert_each_trained_once(stale_run)
    events = stale_run.events("run")
    issued = [event["group"] for event in events if event["event"] == "issued"]
    trained = [event["group"] for event in events if event["event"] == "trained"]
    assert trained == issued


def test_staleness_is_used_and_stays_within_its_bound(stale_run: Any) -> None:
    metrics = stale_run.measured("run")
    assert [line["policy_version"] for line in metrics] == list(range(1, STEPS + 1))
    assert metrics[0]["staleness/max"] == 0
    assert 1 <= max(line["staleness/max"] for line in metrics) <= 2
    for line in metrics:
        shares = [line[f"staleness/share/{age}"] for age in range(3)]
        assert sum(shares) == pytest.approx(1.0)
        assert line["staleness/mean"] == pytest.approx(shares[1] + 2 * shares[2])


def test_stale_tokens_are_corrected(stale_run: Any) -> None:
    metrics = stale_run.measured("run")
    assert all(0 < line["policy/correction_effective_share"] <= 1.0 + 1e-9 for line in metrics)
    assert metrics[0]["policy/mismatch_abs_max"] < 1e-4, "the first step has nothing stale"
    assert max(line["policy/mismatch_abs_max"] for line in metrics) > 1e-4


def test_what_is_trained_on_is_as_long_as_what_was_generated(stale_run: Any) -> None:
    """Although the reward takes longer for longer answers."""
    metrics = stale_run.measured("run")
    assert len({line["response_length/mean"] for line in metrics}) > 1, "lengths differ"
    trained = sum(line["response_length/mean"] for line in metrics)
    sizes = [line["queue/groups_ready"] for line in metrics]
    arrived = [GROUPS_PER_STEP + after - before for before, after in zip([0, *sizes], sizes, strict=False)]
    scored = sum(
        line["response_length/scored_mean"] * count / GROUPS_PER_STEP
        for line, count in zip(metrics, arrived, strict=True)
        if count
    )
    assert sizes[-1] == 0
    assert scored == pytest.approx(trained)


def test_generation_and_scoring_go_on_while_the_learner_trains(stale_run: Any) -> None:
    lanes = stale_run.spans("run")
    learning = [span for span in lanes["controller"] if span[0] in ("train", "prepare", "publish")]
    busy = [span for lane in ("rollout engine 0", "reward engine") for span in lanes[lane]]
    assert sum(starts < end and begun < ends for _, begun, end in learning for _, starts, ends in busy) > STEPS


def test_the_learner_works_on_groups_that_have_come_while_the_step_waits_for_others(stale_run: Any) -> None:
    spans = stale_run.spans("run")["controller"]
    ahead = [(start, end) for name, start, end in spans if name == "work ahead"]
    waits = [(start, end) for name, start, end in spans if name == "generate"]
    assert ahead
    assert all(any(begun <= start and end <= ended for begun, ended in waits) for start, end in ahead)
    for line in stale_run.measured("run"):
        assert line["policy/tokens"] == pytest.approx(line["response_length/mean"] * GROUPS_PER_STEP * SAMPLES), (
            "each token is learned from once, early or not"
        )


def test_metrics_say_who_waited_and_for_how_long(stale_run: Any) -> None:
    for line in stale_run.measured("run"):
        for name in ("learner", "rollout_engine_0", "reward_engine"):
            assert 0 <= line[f"idle/{name}"] <= 1
        assert 0 < line["pause/publish_seconds"] <= line["time/publish"]
        assert all(line[f"queue/groups_{stage}"] >= 0 for stage in ("generating", "scoring", "ready"))


def test_an_evaluation_belongs_to_one_version(stale_run: Any) -> None:
    evaluations = [json.loads(line) for line in stale_run.evaluations("run")]
    assert [(line["step"], line["policy_version"]) for line in evaluations] == [(0, 0), (3, 3), (6, 6)]


def test_a_killed_run_goes_on_and_trains_every_prompt_once(bench: Any) -> None:
    process = bench.start("rl", "run", settings(bench))
    bench.hang_in_step(process, "run", 4)
    process.popen.send_signal(signal.SIGKILL)
    process.popen.wait()
    assert process.survivors(limit_s=15) == []
    checkpoint = max((bench.folder / "run/checkpoints").glob("step-??????"))
    state = json.loads((checkpoint / "controller.json").read_text())
    assert state["rollouts"]["open"], "groups were in flight when the checkpoint was made"

    bench.release()
    bench.resume("run")
    assert_each_trained_once(bench)
    metrics = bench.measured("run")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert max(line["staleness/max"] for line in metrics) <= 2


def test_control_c_ends_an_asynchronous_run_at_once(bench: Any) -> None:
    process = bench.start("rl", "run", settings(bench))
    bench.hang_in_step(process, "run", 3)
    process.interrupt(group=True)
    assert process.finish(limit_s=20) == 130
    assert process.stderr.splitlines()[-1] == "interrupted"
    assert process.survivors(limit_s=10) == []
    assert process.remains() == []


def test_a_killed_reward_engine_that_may_not_be_started_anew_ends_the_run_with_its_name(bench: Any) -> None:
    process = bench.start("rl", "run", settings(bench, cluster__max_engine_restarts=0))
    bench.wait_for_step(process, "run", 2)
    process.look()
    engine = process.find("ray::RewardEngine")
    assert engine is not None
    engine.kill()
    assert process.finish(limit_s=60) == 1
    assert "reward engine died" in process.stderr and "Traceback" not in process.stderr
    assert process.survivors(limit_s=10) == []


def test_dynamic_sampling_replaces_groups_while_the_learner_trains(bench: Any) -> None:
    changes = {
        "algorithm": "dapo",
        "algorithm.overlong_filtering": False,
        "rollout.samples_per_prompt": 2,
        "rollout.max_response_tokens": 2,
    }
    bench.run("rl", "run", settings(bench) | changes)
    ends = Counter(event["event"] for event in bench.events("run"))
    assert ends["trained"] == STEPS * GROUPS_PER_STEP
    assert ends["issued"] == ends["trained"] + ends["filtered"], "what was issued has its end in the ledger"
    filtered = sum(line["dynamic_sampling/groups_filtered"] for line in bench.measured("run"))
    assert filtered == ends["filtered"] > 0
    assert max(line["staleness/max"] for line in bench.measured("run")) <= 2


def test_a_reward_without_signal_ends_the_run_with_a_message(bench: Any) -> None:
    changes = {"algorithm": "dapo", "reward.function": "rewards.py:right_unless_nine", "reward.options": {}}
    process = bench.start("rl", "run", settings(bench) | changes | {"algorithm.dynamic_sampling_limit": 2})
    assert process.finish() == 1
    assert "dynamic sampling issued 16 groups for one step" in process.stderr and "Traceback" not in process.stderr
    assert process.survivors(limit_s=10) == []


def test_ppo_with_vllm_trains_every_prompt_once_on_tokens_of_several_versions(bench: Any) -> None:
    """Critic, old log-probs for two optimizer steps a batch, and a cache that is computed anew at each publish.

    The engine's weights are divided among two workers, the learner's are not.
    """
    changes = {
        "rollout.max_staleness": 1,
        "rollout.tensor_parallel": 2,
        "rollout.recompute_cache_on_update": True,
        "rollout.max_response_tokens": 16,
        "optimizer_steps_per_batch": 2,
        "reward.options.pause_s": 0.2,
        "reward.workers": 4,
    }
    bench.run("rl", "run", bench.remembering_settings() | changes)
    assert_each_trained_once(bench)
    metrics = bench.measured("run")
    assert max(line["staleness/max"] for line in metrics) == 1
    assert not any("non_finite" in line for line in metrics)
    trained = [line for line in metrics if "policy/loss" in line]
    assert len(trained) == STEPS - 1, "the critic warms up in the first step"
    assert all(line["policy/correction_effective_share"] > 0.5 for line in trained)
    assert all(line["weights/probe_difference"] <= 1e-4 for line in metrics)
