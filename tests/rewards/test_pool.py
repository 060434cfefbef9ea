"""The reward pool with real child processes: what goes wrong in one call, and that nothing else does with it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from slipstream.config.schema import RewardConfig
from slipstream.data.failure import FailureKind, RewardFailure
from slipstream.errors import ConfigError, EngineLostError, RewardError
from slipstream.rewards.engine import RewardEngine
from slipstream.rewards.function import ScoredText
from slipstream.rewards.pool import RewardPool, pickle_function, scored_text

# Scores 1.0, unless the response is a statement to run.
OBEDIENT = """
import asyncio, ctypes, math, os, subprocess, sys, time
def reward(text):
    if text.response != "fine":
        exec(text.response, globals())
        return globals().get("value", 1.0)
    return 1.0
"""


@pytest.mark.parametrize(
    ("response", "kind", "failure"),
    [
        ("raise ValueError('no verdict')", "raised", "raised: ValueError: no verdict (<string>, line 1)"),
        ("sys.exit(3)", "raised", "raised: SystemExit: 3 (<string>, line 1)"),
        ("value = None", "returned", "returned None, expected one number"),
        ("value = math.nan", "returned", "returned nan, expected a finite number"),
        ("value = [1.0, 0.0, 1.0]", "returned", "returned 3 values, expected one number"),
        ("value = 'good'", "returned", "returned the string 'good', expected one number"),
        ("os._exit(0)", "killed", "killed: the process ended with exit code 0"),
        ("os._exit(3)", "killed", "killed: the process ended with exit code 3"),
        ("ctypes.string_at(0)", "killed", "killed: the process ended by SIGSEGV, perhaps for lack of memory"),
        (
            "x = bytearray(10**12)",
            "raised",
            "raised: MemoryError at the limit of 512 MiB (reward.memory_bytes)",
        ),
        ("x = [b'1' * 2**20 for _ in range(2**20)]", "raised", "raised: MemoryError at the limit of 512 MiB"),
        (
            "raise TimeoutError('from within')",
            "raised",
            "raised: TimeoutError: from within (<string>, line 1)",
        ),
    ],
)
def test_one_bad_response_fails_alone_and_the_others_keep_their_rewards(score, response, kind, failure):
    results = score(OBEDIENT, "fine", response, "fine", "fine", memory_bytes=2**29)
    assert [result.reward for result in results] == [1.0, None, 1.0, 1.0]
    assert results[1].failure.kind == kind
    assert results[1].failure.message.startswith(failure)
    assert all(result.failure is None for result in (results[0], *results[2:]))


@pytest.mark.parametrize(
    "response",
    ["while True: pass", "time.sleep(1e6)", "sys.set_int_max_str_digits(0) or str(7 ** 50_000_000)"],
)
def test_a_call_that_never_returns_is_killed_at_its_limit(score, response):
    started = time.monotonic()
    results = score(OBEDIENT, "fine", response, "fine", timeout_s=0.5)
    assert [result.reward for result in results] == [1.0, None, 1.0]
    assert results[1].failure == RewardFailure(FailureKind.TIMED_OUT, "timed out after 0.5 s")
    assert 0.5 <= results[1].seconds < 10
    assert time.monotonic() - started < 20


def test_the_pool_goes_on_after_a_kill_with_a_new_process(with_pool, trajectory):
    async def use(pool: RewardPool):
        await pool.start()
        before = pool.process_ids
        await pool.score([trajectory("os._exit(1)")])
        (result,) = await pool.score([trajectory("fine")])
        return before, pool.process_ids, result

    before, after, result = with_pool(OBEDIENT, use)
    assert result.reward == 1.0
    assert len(before) == len(after) == 1
    assert before != after


FORKS = """
import os, stat
def reward(text):
    if text.response == "fork":
        os.fork()
    if text.response == "stray":
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, (5).to_bytes(8, "big") + b"[1, 2")
            except OSError:
                pass
        return 0.0
    return {"fork": 0.25}.get(text.response) or float(text.response)
"""


@pytest.mark.parametrize("odd", ["fork", "stray"])
def test_no_call_is_given_the_answer_to_another(score, odd):
    """A function that forks comes back twice; one that writes to every descriptor writes to the pool's channel."""
    results = score(FORKS, "1", odd, "2", odd, "3", "4", workers=1)
    assert [results[place].reward for place in (0, 2, 4, 5)] == [1.0, 2.0, 3.0, 4.0]
    for place in (1, 3):
        if odd == "fork":
            assert results[place].reward == 0.25
        else:
            assert results[place].failure.kind == FailureKind.KILLED
            assert "no answer to this call" in results[place].failure.message


def test_a_process_that_died_between_calls_is_replaced_and_no_call_is_blamed(with_pool, trajectory):
    async def use(pool: RewardPool):
        await pool.start()
        psutil.Process(pool.process_ids[0]).kill()
        await asyncio.sleep(0.2)
        return await pool.score([trajectory("fine")])

    (result,) = with_pool(OBEDIENT, use)
    assert (result.reward, result.failure) == (1.0, None)


def test_a_failed_call_is_repeated_if_so_configured(score):
    source = "import os\ndef reward(text):\n    n = os.path.exists('tried')\n    open('tried', 'w')\n    return 1.0 / n"
    (failed,) = score(source, "x", on_failure="retry", retries=1)
    assert failed.reward == 1.0
    (stubborn,) = score("def reward(text): return 1 / 0", "x", on_failure="retry", retries=2)
    assert stubborn.reward is None
    assert str(stubborn.failure).startswith("raised: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("on_failure", "calls"), [("retry", 3), ("drop_group", 1), ("stop", 1)])
def test_attempts_follow_the_policy(score, tmp_path, on_failure, calls):
    source = "def reward(text):\n    open('calls', 'a').write('.')\n    raise ValueError"
    score(source, "x", on_failure=on_failure, retries=2)
    assert (tmp_path / "calls").read_text() == "." * calls


def test_results_come_in_the_order_of_the_trajectories_from_several_workers(score):
    source = "import time\ndef reward(text):\n    time.sleep(float(text.response))\n    return float(text.response)"
    delays = ["0.2", "0", "0.1", "0.05", "0.15", "0"]
    assert [result.reward for result in score(source, *delays, workers=3)] == [float(delay) for delay in delays]


def test_named_parts_come_back_with_their_sum(score):
    (result,) = score("def reward(text): return {'right': 1.0, 'format': 0.5}", "x")
    assert (result.reward, result.parts) == (1.5, {"right": 1.0, "format": 0.5})


def test_options_are_passed_as_keyword_arguments(score):
    (result,) = score("def reward(text, *, bonus): return bonus", "x", options={"bonus": 0.75})
    assert result.reward == 0.75


def test_a_function_is_shown_the_whole_trajectory_as_text(with_pool, trajectory):
    source = textwrap.dedent("""
        def reward(text):
            assert (text.prompt, text.response, text.label, text.fields) == ("1 + 1 =", "two", [2], {"level": 3})
            assert (text.finish_reason, text.response_length, text.response_tokens) == ("stop", 2, (2, 3))
            assert [(turn.role, turn.text) for turn in text.turns] == [("prompt", "1 + 1 ="), ("assistant", "two")]
            return 1.0
    """)
    item = trajectory("two", label=[2], fields={"level": 3})
    (result,) = with_pool(source, lambda pool: pool.score([item]))
    assert result.failure is None


def test_a_coroutine_function_is_awaited_and_cancelled_at_its_limit(with_pool, trajectory):
    source = textwrap.dedent("""
        import asyncio
        async def reward(text):
            await asyncio.sleep(float(text.response))
            return 1.0
    """)

    async def use(pool: RewardPool):
        await pool.start()
        before = pool.process_ids
        results = await pool.score([trajectory(response) for response in ("0", "100", "0")])
        return results, before == pool.process_ids

    results, same_process = with_pool(source, use, timeout_s=0.5)
    assert [result.reward for result in results] == [1.0, None, 1.0]
    assert results[1].failure == RewardFailure(FailureKind.TIMED_OUT, "timed out after 0.5 s")
    assert same_process


def test_what_a_function_prints_does_not_reach_standard_output(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os\ndef reward(text):\n    print('noise'); os.write(1, b'raw'); return 1.0"
    )
    script = textwrap.dedent("""
        import asyncio, json
        from conftest import make_trajectory
        from slipstream.config.schema import RewardConfig
        from slipstream.rewards.pool import RewardPool
        async def main():
            pool = RewardPool(RewardConfig(function="loud.py:reward"))
            results = await pool.score([make_trajectory("x")])
            await pool.close()
            print(json.dumps([result.reward for result in results]))
        asyncio.run(main())
    """)
    done = run_script(script, tmp_path)
    assert done.stdout.strip() == "[1.0]"
    assert "noise" in done.stderr
    assert "raw" in done.stderr


def test_half_an_emoji_and_other_odd_characters_travel(score):
    source = textwrap.dedent("""
        def reward(text):
            if len(text.response) > 1:
                raise ValueError(text.response)
            return ord(text.response)
    """)
    results = score(source, "\ud83d", "\0", "\ud83dx")
    assert [result.reward for result in results] == [0xD83D, 0.0, None]
    assert str(results[2].failure).startswith("raised: ValueError: \ud83dx")


def test_an_exception_whose_text_cannot_be_made_is_still_a_failure_of_one_call(score):
    source = textwrap.dedent("""
        class Nasty(Exception):
            def __str__(self): raise RuntimeError
        def reward(text):
            if text.response == "bad": raise Nasty
            return 1.0
    """)
    results = score(source, "bad", "good")
    assert "Nasty: <exception str() failed>" in str(results[0].failure)
    assert results[1].reward == 1.0


def test_a_closure_travels_as_an_object(trajectory):
    bonus = 0.25
    engine = RewardEngine(RewardConfig(function="math"), pickle_function(lambda text: len(text.response) + bonus))

    async def main():
        await engine.start()
        results = await engine.score([trajectory("abc")])
        await engine.shutdown()
        await engine.shutdown()
        return results

    (result,) = asyncio.run(main())
    assert (result.reward, result.failure) == (3.25, None)


def test_an_object_that_cannot_travel_is_refused_before_anything_starts():
    lock = threading.Lock()
    with pytest.raises(RewardError, match=r"cannot be sent to another process: .*lock.*; give it by import path"):
        pickle_function(lambda text: float(lock.locked()))


def test_neither_a_name_nor_an_object_is_refused():
    with pytest.raises(ConfigError, match="must name what scores a response, found null"):
        RewardPool(RewardConfig(function=None))


@pytest.mark.parametrize(
    ("source", "config", "error", "message"),
    [
        ("import not_installed", {}, RewardError, "raised ModuleNotFoundError: No module named 'not_installed'"),
        ("raise SystemExit(4)", {}, RewardError, "raised SystemExit: 4"),
        ("import os; os._exit(5)", {}, RewardError, "ended while it imported .* exit code 5"),
        ("import os; os.kill(os.getpid(), 9)", {}, EngineLostError, "ended while it imported .* SIGKILL"),
        ("def revard(text): return 1", {}, ConfigError, "no function 'reward'; found revard; did you mean 'revard'"),
        ("def reward(text): return 1", {"options": {"x": 1}}, ConfigError, "reward.options do not fit"),
        ("", {"function": "gone.py:reward"}, ConfigError, "there is no file .*gone.py"),
    ],
)
def test_a_function_that_cannot_be_loaded_stops_the_start(with_pool, source, config, error, message):
    with pytest.raises(error, match=message):
        with_pool(source, lambda pool: pool.start(), **config)


def test_start_calls_the_function_not_once(with_pool, tmp_path):
    with_pool("def reward(text): open('called', 'w'); return 1.0", lambda pool: pool.start())
    assert not (tmp_path / "called").exists()


def test_an_import_that_hangs_ends_at_the_start_limit(with_pool, monkeypatch):
    monkeypatch.setattr("slipstream.rewards.child.START_TIMEOUT_S", 1.0)
    with pytest.raises(RewardError, match="did not import the reward function within 1 s"):
        with_pool("import time; time.sleep(1e6)", lambda pool: pool.start())


def test_close_leaves_no_process_not_even_those_a_function_started(with_pool, trajectory):
    async def use(pool: RewardPool):
        await pool.start()
        (result,) = await pool.score([trajectory("value = subprocess.Popen(['sleep', '1000']).pid")])
        started = [psutil.Process(pid) for pid in (*pool.process_ids, int(result.reward))]
        assert all(process.is_running() for process in started)
        await pool.close()
        await pool.close()
        return started

    started = with_pool(OBEDIENT, use, workers=2)
    assert len(started) == 3
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


def test_close_ends_calls_in_progress_and_later_ones(with_pool, trajectory):
    async def use(pool: RewardPool):
        scoring = asyncio.create_task(pool.score([trajectory("time.sleep(1e6)"), trajectory("fine")]))
        await asyncio.sleep(1.0)
        await pool.close()
        for attempt in (scoring, pool.score([trajectory("fine")])):
            with pytest.raises(RewardError, match="closed"):
                await attempt

    with_pool(OBEDIENT, use, on_failure="retry")


def test_a_cancelled_call_does_not_leave_its_answer_to_the_next(with_pool, trajectory):
    async def use(pool: RewardPool):
        await pool.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score([trajectory("time.sleep(0.7); value = 5.0")]), 0.3)
        return await pool.score([trajectory("fine")])

    (result,) = with_pool(OBEDIENT, use)
    assert result.reward == 1.0


def test_children_die_with_a_parent_that_is_killed_even_while_they_hang(tmp_path):
    (tmp_path / "stuck.py").write_text(
        "import os\ndef reward(text):\n    open('pid', 'w').write(str(os.getpid()))\n    while True: pass"
    )
    script = textwrap.dedent("""
        import asyncio, os, threading, time
        from conftest import make_trajectory
        from slipstream.config.schema import RewardConfig
        from slipstream.rewards.pool import RewardPool
        def die():
            while not (os.path.exists("pid") and open("pid").read()): time.sleep(0.05)
            os.kill(os.getpid(), 9)
        threading.Thread(target=die).start()
        pool = RewardPool(RewardConfig(function="stuck.py:reward", timeout_s=1000))
        asyncio.run(pool.score([make_trajectory("x")]))
    """)
    assert run_script(script, tmp_path).returncode == -9
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"the child {pid} outlived its parent"
        time.sleep(0.05)


def test_a_rollout_batch_of_cheap_calls_goes_through(with_pool, trajectory):
    items = [trajectory("#### 2" if i % 3 else "#### 3", index=i) for i in range(768)]
    results = with_pool("", lambda pool: pool.score(items), function="math")
    assert [result.reward for result in results] == [1.0 if i % 3 else 0.0 for i in range(768)]


def test_a_text_that_would_freeze_an_evaluating_rule_is_scored_like_any_other(with_pool, trajectory):
    items = [trajectory("\\boxed{10^{10^{10}}}" if i == 5 else "#### 2") for i in range(16)]
    results = with_pool("", lambda pool: pool.score(items), function="math")
    assert [result.reward for result in results] == [0.0 if i == 5 else 1.0 for i in range(16)]


@pytest.mark.parametrize("label", ["see above", "", "   ", None])
@pytest.mark.parametrize("function", ["math", "exact_match"])
def test_a_row_without_a_usable_label_is_a_failure_and_never_pays(with_pool, trajectory, label, function):
    """Where prose or nothing stood in the label column, open-r1 paid 1.0 (huggingface/open-r1#215, #293)."""
    responses = ("2", "", "see above", "None")
    items = [*(trajectory(response, label=label) for response in responses), trajectory("2")]
    *bad, good = with_pool("", lambda pool: pool.score(items), function=function)
    if function == "exact_match" and label == "see above":
        assert [result.reward for result in bad] == [0.0, 0.0, 1.0, 0.0], "a text like any other"
    else:
        assert [result.reward for result in bad] == [None] * 4
        assert {result.failure.kind for result in bad} == {FailureKind.RAISED}
        assert "the label must be a" in str(bad[0].failure)
    assert good.reward == 1.0


def test_one_none_or_nan_among_eight_leaves_the_other_seven_as_they_are(score):
    """One such value made the statistics of a whole batch NaN (modelscope/ms-swift#8123, huggingface/trl#5775)."""
    responses = ["fine"] * 3 + ["value = None"] + ["fine"] * 4
    results = score(OBEDIENT, *responses)
    assert [result.reward for result in results] == [1.0] * 3 + [None] + [1.0] * 4
    results = score(OBEDIENT, *[response.replace("None", "math.nan") for response in responses])
    assert [result.reward for result in results] == [1.0] * 3 + [None] + [1.0] * 4
    assert results[3].failure == RewardFailure(FailureKind.RETURNED, "returned nan, expected a finite number")


def test_a_computation_that_cannot_be_cancelled_costs_its_own_response_and_its_process(with_pool, trajectory):
    """A hung sympy call stalled the whole batch (areal-project/AReaL#1426, LLM360/Reasoning360#109)."""
    source = textwrap.dedent("""
        def reward(text):
            content = text.response.removeprefix("\\\\boxed{").removesuffix("}")
            return float(content == "2" or 10 ** 10 ** 10 == 0)
    """)
    items = [trajectory("\\boxed{10^{10^{10}}}" if i == 5 else "\\boxed{2}") for i in range(16)]

    async def use(pool: RewardPool):
        await pool.start()
        before = pool.process_ids
        started = time.monotonic()
        results = await pool.score(items)
        return results, time.monotonic() - started, before, pool.process_ids

    results, seconds, before, after = with_pool(source, use, timeout_s=1.0, workers=2)
    assert [result.reward for result in results] == [None if i == 5 else 1.0 for i in range(16)]
    assert results[5].failure == RewardFailure(FailureKind.TIMED_OUT, "timed out after 1 s")
    assert 1.0 <= seconds < 30
    assert len(set(before) & set(after)) == 1, "one worker was replaced, the other is as it was"


def test_limits_hold_in_a_thread_without_any_signal_of_this_process(with_pool, trajectory, monkeypatch):
    """Limits by SIGALRM raise outside the main thread, or hit a process without a handler (verl-project/verl#1331)."""
    found, used = [], []

    def score() -> None:
        items = [trajectory("fine"), trajectory("while True: pass"), trajectory("fine")]
        found.extend(with_pool(OBEDIENT, lambda pool: pool.score(items), timeout_s=0.5))

    thread = threading.Thread(target=score)
    with monkeypatch.context() as patched:
        for name in ("signal", "alarm", "setitimer"):
            patched.setattr(signal, name, lambda *arguments: used.append(arguments))
        thread.start()
        thread.join(60)
    assert [result.reward for result in found] == [1.0, None, 1.0]
    assert used == []


def test_a_function_may_use_time_limits_of_its_own(score):
    source = textwrap.dedent("""
        import signal
        def stop(number, frame): raise TimeoutError("after its own limit")
        signal.signal(signal.SIGALRM, stop)
        def reward(text):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            while True: pass
    """)
    (result,) = score(source, "x")
    assert str(result.failure).startswith("raised: TimeoutError: after its own limit")


def test_the_answer_that_was_read_comes_back_and_its_lack_can_be_told_from_not_knowing_any(score):
    source = textwrap.dedent("""
        from slipstream import Score
        def reward(text):
            return 0.5 if text.response == "plain" else Score(1.0, {"a": 2.0}, {"72": "72"}.get(text.response))
    """)
    read, unread, plain = score(source, "72", "no idea", "plain")
    assert (read.reward, read.parts, read.answer, read.reads_answers) == (1.0, {"a": 2.0}, "72", True)
    assert (unread.answer, unread.reads_answers) == (None, True)
    assert (plain.answer, plain.reads_answers) == (None, False)


def test_texts_without_a_trajectory_are_scored_alike(with_pool, trajectory):
    texts = [scored_text(trajectory("2")), ScoredText("", "3", "2", {}, "stop", 0)]
    results = with_pool("", lambda pool: pool.score_texts(texts), function="math")
    assert [result.reward for result in results] == [1.0, 0.0]


def test_nothing_to_score_gives_nothing(score):
    assert score(OBEDIENT) == []


def test_scored_text_has_what_the_trajectory_has(trajectory):
    text = scored_text(trajectory("r", label=5))
    assert (text.prompt, text.response, text.label, text.response_length) == ("1 + 1 =", "r", 5, 2)


def run_script(script: str, folder) -> subprocess.CompletedProcess:
    """Run a script in a folder, with this package and the shared test helpers importable."""
    path = [os.path.dirname(__file__), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
