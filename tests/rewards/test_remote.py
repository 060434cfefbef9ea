"""Rewards from a service over HTTP: what it is sent, and everything that can go wrong with it.

The faults are those of remote reward models that made runs of other frameworks wait for ever (TideDra/lmm-r1#30,
databricks/compose-rl#87 and #97) or go without any reward (OpenRLHF/OpenRLHF#1113, #1140): nothing listens, no answer
comes, HTTP status 500, too few rewards, no JSON.
"""

import asyncio
import json
import logging
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.schema import RewardConfig
from slipstream.data.failure import FailureKind
from slipstream.data.turn import Turn
from slipstream.errors import RewardError
from slipstream.rewards import remote
from slipstream.rewards.circuit import FAILURES_TO_OPEN
from slipstream.rewards.engine import RewardEngine
from slipstream.rewards.function import ScoredText, UnusableRewardError

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_server" / "server.py"
Reply = tuple[int, bytes] | None


def right(request: dict[str, Any]) -> Reply:
    return 200, json.dumps({"reward": float(request["response"] == "2")}).encode()


@pytest.fixture
def serve(make_server: Callable[..., Any]) -> Callable[..., Any]:
    """`serve(reply)`: a server whose replies are right unless another function makes them."""
    return lambda reply=right: make_server(reply)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.delenv(remote.TOKEN_VARIABLE, raising=False)


def nothing_listens() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/score"


def text(response: str = "2", **fields: Any) -> ScoredText:
    turns = (Turn("prompt", "1 + 1 ="), Turn("assistant", response))
    return ScoredText("1 + 1 =", response, "2", fields, "stop", 3, turns, (5, 6, 7))


def ask(urls: list[str], *texts: ScoredText, start: bool = False, **config: Any) -> list[Any]:
    """The results of a service, which is closed afterwards; fails if it takes longer than a minute."""
    settings = {"on_failure": "drop_group", "timeout_s": 5.0} | config

    async def main() -> list[Any]:
        service = remote.RewardService(RewardConfig(urls=urls, **settings))
        try:
            if start:
                await service.start()
            return await service.score_texts(texts)
        finally:
            await service.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


# ---------------------------------------------------------------- what is sent and understood


def test_a_request_has_all_that_is_known_of_one_response(serve):
    server = serve()
    (result,) = ask([server.url], text("2", level=3, when=np.datetime64("2024-05-01"), odd=math.nan, n=np.int64(4)))
    assert (result.reward, result.failure, result.parts, result.answer) == (1.0, None, {}, None)
    assert server.requests == [
        {
            "prompt": "1 + 1 =",
            "response": "2",
            "label": "2",
            "fields": {"level": 3, "when": "2024-05-01", "odd": None, "n": 4},
            "finish_reason": "stop",
            "response_length": 3,
            "turns": [{"role": "prompt", "text": "1 + 1 ="}, {"role": "assistant", "text": "2"}],
        }
    ]


def test_half_an_emoji_travels(serve):
    server = serve()
    ask([server.url], text("\ud83d"))
    assert server.requests[0]["response"] == "\ud83d"


def test_parts_and_answer_come_back(serve):
    server = serve(lambda request: (200, b'{"reward": 0.5, "parts": {"right": true, "form": 0.25}, "answer": "72"}'))
    (result,) = ask([server.url], text())
    assert (result.reward, result.parts, result.answer) == (0.5, {"right": 1.0, "form": 0.25}, "72")
    assert result.reads_answers


def test_results_come_in_the_order_of_the_responses_whichever_answers_first(serve):
    def slow_first(request: dict[str, Any]) -> Reply:
        time.sleep(0.2 if request["response"] == "0" else 0.0)
        return 200, json.dumps({"reward": float(request["response"])}).encode()

    server = serve(slow_first)
    results = ask([server.url], *(text(str(i)) for i in range(6)), workers=3)
    assert [result.reward for result in results] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_addresses_take_turns_with_a_bounded_number_of_requests_each(serve):
    def slow(request: dict[str, Any]) -> Reply:
        time.sleep(0.02)
        return right(request)

    servers = [serve(slow), serve(slow)]
    results = ask([server.url for server in servers], *[text()] * 24, workers=2)
    assert [result.reward for result in results] == [1.0] * 24
    assert [len(server.requests) for server in servers] == [12, 12]
    assert [server.most_at_a_time for server in servers] == [2, 2]


def test_a_token_from_the_environment_is_sent_and_never_shown(serve, monkeypatch, caplog, capfd):
    monkeypatch.setenv(remote.TOKEN_VARIABLE, "sesame-17\n")
    server = serve(lambda request: (403, b"no"))
    server.get_status = 403
    with caplog.at_level(logging.DEBUG):
        (result,) = ask([server.url], text())
        with pytest.raises(RewardError, match=r"refuses access \(HTTP 403\); set the environment variable") as caught:
            ask([server.url], start=True)
    assert server.headers[0]["Authorization"] == "Bearer sesame-17"
    shown = caplog.text + str(caught.value) + str(result) + "".join(capfd.readouterr())
    assert "sesame" not in shown
    monkeypatch.delenv(remote.TOKEN_VARIABLE)
    ask([server.url], text())
    assert "Authorization" not in server.headers[1]


def test_proxies_of_the_environment_are_not_used(serve, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, nothing_listens())
    (result,) = ask([serve().url], text())
    assert result.reward == 1.0


def test_the_example_server_runs_with_the_standard_library_alone(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-I", str(EXAMPLE), str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            time.sleep(0.05)
        results = ask([f"http://127.0.0.1:{port}"], text("so it is 2"), text("3"), text(""), start=True)
    finally:
        process.kill()
        process.wait(10)
    assert [result.reward for result in results] == [1.0, 0.0, 0.0]
    assert [result.answer for result in results] == ["2", "3", ""]
    assert results[0].parts == {"right": 1.0}


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        ((500, b"{}"), "refused", r"refused: http://\S+/score answered with HTTP status 500"),
        ((404, b'{"reward": 1}'), "refused", "HTTP status 404"),
        ((302, b'{"reward": 1}'), "refused", "HTTP status 302"),
        ((200, b"<html>busy</html>"), "returned", "returned '<html>busy</html>', expected JSON"),
        ((200, b"\xff\xfe"), "returned", "expected JSON"),
        ((200, b""), "returned", "returned '', expected JSON"),
        ((200, b"[" * 100_000), "returned", "expected JSON"),
        ((200, b"9" * 100_000), "returned", "expected JSON"),
        ((200, b"null"), "returned", "returned 'null', expected a JSON object with 'reward'"),
        ((200, b"1.0"), "returned", "expected a JSON object with 'reward'"),
        ((200, b"[1.0]"), "returned", "expected a JSON object with 'reward'"),
        ((200, b"{}"), "returned", "expected a JSON object with 'reward'"),
        ((200, b'{"reward": []}'), "returned", "returned 0 values, expected one number"),
        ((200, b'{"reward": [1.0, 0.0]}'), "returned", "returned 2 values, expected one number"),
        ((200, b'{"reward": null}'), "returned", "returned None, expected one number"),
        ((200, b'{"reward": NaN}'), "returned", "returned nan, expected a finite number"),
        ((200, b'{"reward": 1e999}'), "returned", "returned inf"),
        ((200, b'{"reward": "1.0"}'), "returned", "returned the string '1.0'"),
        ((200, b'{"reward": 1.0, "parts": [1]}'), "returned", "returned parts that are no JSON object"),
        ((200, b'{"reward": 1.0, "parts": {"a": null}}'), "returned", "returned None, expected one number for 'a'"),
        ((200, b'{"reward": 1.0, "rewards": [1]}'), "returned", "returned the unknown key 'rewards'"),
        ((200, b'{"reward": 1.0, "answer": "' + b"x" * (1 << 20) + b'"}'), "returned", "more than 1048576 bytes"),
    ],
)
def test_one_bad_answer_fails_alone_with_its_kind(serve, reply, kind, message):
    server = serve(lambda request: reply if request["response"] == "bad" else right(request))
    server.extra_headers = {"Location": "/elsewhere"}
    good, bad, other = ask([server.url], text("2"), text("bad"), text("3"))
    assert (good.reward, bad.reward, other.reward) == (1.0, None, 0.0)
    assert bad.failure.kind == kind
    assert re.search(message, bad.failure.message), bad.failure.message
    assert len(server.requests) == 3, "a redirect is not followed"


def test_an_endless_answer_is_not_read_to_its_end(serve):
    server = serve(lambda request: (200, b"1" * (64 << 20)))
    started = time.monotonic()
    (result,) = ask([server.url], text(), timeout_s=30)
    assert "more than 1048576 bytes" in result.failure.message
    assert time.monotonic() - started < 20


def test_a_compressed_answer_is_taken_as_the_bytes_it_is(serve):
    import gzip

    server = serve(lambda request: (200, gzip.compress(b'{"reward": 1.0}' + b" " * (64 << 20))))
    server.extra_headers = {"Content-Encoding": "gzip"}
    (result,) = ask([server.url], text())
    assert (result.failure.kind, server.headers[0]["Accept-Encoding"]) == ("returned", "identity")


def test_a_service_that_never_answers_costs_each_response_its_limit_and_no_more(serve):
    server = serve(lambda request: None if request["response"] == "slow" else right(request))
    started = time.monotonic()
    good, slow, other = ask([server.url], text(), text("slow"), text(), timeout_s=2)
    assert (good.reward, slow.reward, other.reward) == (1.0, None, 1.0)
    assert slow.failure.kind == FailureKind.TIMED_OUT
    assert slow.failure.message == f"timed out after 2 s: {server.url}"
    assert time.monotonic() - started < 20


def test_an_answer_that_trickles_is_bounded_as_a_whole(serve):
    """Every byte comes in time, and yet the answer does not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while not over.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        (result,) = ask([f"http://127.0.0.1:{listener.getsockname()[1]}"], text(), timeout_s=0.5)
        over.set()
        thread.join(5)
    assert result.failure.kind == FailureKind.TIMED_OUT


def test_nothing_that_listens_is_a_failure_at_once_and_at_the_start_an_error_that_names_the_address(serve):
    url = nothing_listens()
    (result,) = ask([url], text())
    assert result.failure.kind == FailureKind.UNREACHABLE
    assert result.failure.message.startswith(f"unreachable: {url}: ")
    with pytest.raises(RewardError, match=rf"reward\.urls: the reward service at {url} does not answer: .*; start it"):
        ask([serve().url, url], start=True)


def test_at_the_start_an_address_that_accepts_and_is_silent_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RewardError, match=r"does not answer: no answer within 0\.3 s"):
            ask([url], start=True, timeout_s=0.3)


@pytest.mark.parametrize("host", ["x" * 64, "a..b", "no such host", "nowhere.invalid"])
def test_at_the_start_a_name_that_is_none_is_an_error(host):
    with pytest.raises(
        RewardError, match=rf"reward\.urls: the reward service at http://{re.escape(host)}/ does not answer"
    ):
        ask([f"http://{host}/"], start=True)


def test_a_server_that_only_knows_posts_is_there(serve):
    server = serve()
    server.get_status = 501
    assert ask([server.url], text(), start=True)[0].reward == 1.0
    assert len(server.requests) == 1


def test_a_row_that_json_cannot_say_fails_alone(serve):
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    server = serve()
    good, deep, long = ask([server.url], text(), text(level=nested), text(level=10**5000))
    assert good.reward == 1.0
    for result in (deep, long):
        assert result.failure.kind == FailureKind.RAISED
        assert result.failure.message.startswith("raised: the row cannot be written as JSON: ")
    assert len(server.requests) == 1


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*remote.KEYS, "x"]), inner, max_size=4)
    ),
)


@given(st.binary(max_size=60) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_whatever_is_received_is_a_finite_reward_or_none_at_all(content):
    try:
        score, _ = remote._read_answer(content)
    except UnusableRewardError as error:
        assert str(error).startswith("returned ")
        return
    assert math.isfinite(score.reward) and all(map(math.isfinite, score.parts.values()))
    assert score.answer is None or isinstance(score.answer, str)


# ---------------------------------------------------------------- again, elsewhere, not at all


def failing_first(times: int) -> Callable[[dict[str, Any]], Reply]:
    seen: list[int] = []

    def reply(request: dict[str, Any]) -> Reply:
        seen.append(1)
        return (503, b"") if len(seen) <= times else right(request)

    return reply


@pytest.mark.parametrize(
    ("on_failure", "retries", "requests", "reward"), [("retry", 2, 3, 1.0), ("retry", 1, 2, None), ("stop", 2, 1, None)]
)
def test_attempts_follow_the_policy(serve, on_failure, retries, requests, reward):
    server = serve(failing_first(2))
    (result,) = ask([server.url], text(), on_failure=on_failure, retries=retries)
    assert (result.reward, len(server.requests)) == (reward, requests)


def test_pauses_double_up_to_a_bound_with_chance_added(serve, monkeypatch):
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float, *arguments: Any) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.25)
    ask([serve(lambda request: (404, b"")).url], text(), on_failure="retry", retries=8)
    for pause, base in zip(pauses, [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0], strict=True):
        assert base <= pause <= base + 0.25
    assert len(set(pauses[:5])) == 5


def test_the_next_attempt_goes_to_another_address(serve):
    broken, sound = serve(lambda request: (500, b"")), serve()
    results = ask([broken.url, sound.url], *[text()] * 4, on_failure="retry", retries=1)
    assert [result.reward for result in results] == [1.0] * 4


def test_an_address_that_keeps_failing_is_left_out(serve):
    broken, sound = serve(lambda request: (500, b"")), serve()
    results = ask([broken.url, sound.url], *[text()] * 60, on_failure="drop_group")
    assert len(broken.requests) == FAILURES_TO_OPEN
    assert sum(result.failure is not None for result in results) == FAILURES_TO_OPEN
    assert len(sound.requests) == 60 - FAILURES_TO_OPEN


def test_when_all_are_left_out_a_response_fails_at_once_and_says_why(serve):
    silent = serve(lambda request: None)
    started = time.monotonic()
    results = ask([silent.url], *[text()] * 200, timeout_s=0.2)
    assert time.monotonic() - started < 20, "200 deadlines would be 40 s"
    assert len(silent.requests) <= FAILURES_TO_OPEN
    assert {result.failure.kind for result in results[:FAILURES_TO_OPEN]} == {FailureKind.TIMED_OUT}
    last = results[-1].failure
    assert last.kind == FailureKind.UNREACHABLE
    assert f"every address of reward.urls is left out after repeated failures: {silent.url} (timed out" in last.message


def test_an_address_that_recovered_is_probed_by_one_while_the_others_wait(serve, monkeypatch):
    monkeypatch.setattr("slipstream.rewards.circuit.OPEN_S", 0.2)
    is_up = threading.Event()

    def reply(request: dict[str, Any]) -> Reply:
        if not is_up.is_set():
            return 503, b""
        if not started:
            started.append(len(server.requests))
            time.sleep(0.2)
            started.append(len(server.requests))
        return right(request)

    server = serve(reply)
    started: list[int] = []  # requests received when the probe came, and when it was answered
    sent = 0

    async def main() -> list[Any]:
        nonlocal sent
        config = RewardConfig(urls=[server.url], on_failure="drop_group", workers=3)
        service = remote.RewardService(config)
        try:
            assert all(result.failure for result in await service.score_texts([text()] * 20))
            sent = len(server.requests)
            await asyncio.sleep(0.3)
            is_up.set()
            return await service.score_texts([text()] * 10)
        finally:
            await service.close()

    results = asyncio.run(main())
    assert FAILURES_TO_OPEN <= sent < FAILURES_TO_OPEN + 3
    assert [result.reward for result in results] == [1.0] * 10
    assert started == [sent + 1, sent + 1]


def test_bad_answers_do_not_count_against_the_address(serve):
    server = serve(lambda request: (200, b"{}"))
    ask([server.url], *[text()] * 20)
    assert len(server.requests) == 20


# ---------------------------------------------------------------- in the engine


def test_the_engine_scores_trajectories_by_the_service_and_starts_no_process(serve, trajectory):
    server = serve()

    async def main() -> list[Any]:
        engine = RewardEngine(RewardConfig(urls=[server.url]))
        try:
            await engine.start()
            return await engine.score([trajectory("2"), trajectory("3")])
        finally:
            await engine.shutdown()
            await engine.shutdown()

    results = asyncio.run(main())
    assert [result.reward for result in results] == [1.0, 0.0]
    assert [turn["role"] for turn in server.requests[0]["turns"]] == ["prompt", "assistant"]
