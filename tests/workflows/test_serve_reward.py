"""`slipstream serve-reward` as a process: what the client of a run gets from it, and how it ends."""

import asyncio
import json
import re
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config.schema import RewardConfig
from slipstream.data.failure import FailureKind
from slipstream.errors import RewardError
from slipstream.rewards import remote
from slipstream.rewards.function import ScoredText
from slipstream.rewards.remote import RewardService

pytestmark = pytest.mark.timeout(300)

REWARD = '''\
"""A reward that does on request what it should not."""

import os
import time


def reward(text, *, bonus=0.0):
    if text.response == "raise":
        raise KeyError("asked to fail")
    if text.response == "hang":
        time.sleep(600)
    if text.response == "exit":
        os._exit(3)
    return {"right": float(text.response == text.label), "bonus": bonus}
'''


class Service:
    """A service that has said where it is."""

    def __init__(self, bench: Any, *arguments: str) -> None:
        (bench.folder / "served.py").write_text(REWARD)
        self.process = bench.command("serve-reward", *arguments, "--port", "0")
        line = self.process.popen.stdout.readline()
        found = re.fullmatch(r"serving at (http://127\.0\.0\.1:\d+/score) \(Ctrl-C ends it\)\n", line)
        assert found, line + self.process.popen.stderr.read()
        self.url = found[1]

    def ask(self, *responses: str, timeout_s: float = 30.0) -> list[Any]:
        """What the client of a run makes of the service's answers."""

        async def score() -> list[Any]:
            client = RewardService(
                RewardConfig(urls=[self.url], workers=4, timeout_s=timeout_s, on_failure="drop_group")
            )
            try:
                await client.start()
                return await client.score_texts([ScoredText("1+1", each, "2", {}, "stop", 3) for each in responses])
            finally:
                await client.close()

        return asyncio.run(asyncio.wait_for(score(), 60))

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url.replace("/score", "/metrics"), timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def end(self, number: signal.Signals) -> int:
        self.process.look()
        self.process.popen.send_signal(number)
        began = time.monotonic()
        code: int = self.process.finish(limit_s=20)
        assert time.monotonic() - began < 10
        assert self.process.survivors(limit_s=5) == []
        return code


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(remote.TOKEN_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def of_function(make_workbench: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    bench = make_workbench(tmp_path_factory.mktemp("served"))
    limits = ("--workers", "2", "--timeout_s", "1", "--options", "{bonus: 0.5}")
    yield Service(bench, "--function", "served.py:reward", *limits)


@pytest.mark.slow
def test_a_run_is_given_reward_and_parts(of_function: Service) -> None:
    right, wrong = of_function.ask("2", "3")
    assert (right.reward, right.parts) == (1.5, {"right": 1.0, "bonus": 0.5})
    assert (wrong.reward, wrong.failure) == (0.5, None)


@pytest.mark.slow
def test_a_call_that_fails_costs_itself_alone_and_is_counted(of_function: Service) -> None:
    results = of_function.ask("raise", "2", "hang", "exit", "2")
    assert [result.reward for result in results] == [None, 1.5, None, None, 1.5]
    failures = [result.failure for result in results if result.failure]
    assert {failure.kind for failure in failures} == {FailureKind.REFUSED}
    assert all("HTTP status 422" in failure.message for failure in failures)
    counted = re.findall(
        r'^slipstream_reward_failures_total\{kind="(\w+)"\} (\S+)$', of_function.metrics(), re.MULTILINE
    )
    assert sorted(counted) == [("killed", "1.0"), ("raised", "1.0"), ("timed_out", "1.0")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_within_seconds_even_while_it_scores(bench: Any, number: signal.Signals) -> None:
    service = Service(bench, "--function", "served.py:reward", "--workers", "1", "--timeout_s", "300")
    request = urllib.request.Request(service.url, json.dumps({"response": "hang"}).encode())
    with pytest.raises(OSError):
        urllib.request.urlopen(request, timeout=1)
    with socket.create_connection(("127.0.0.1", int(service.url.split(":")[2].split("/")[0]))) as connection:
        body = b'{"response": "hang"}'
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        time.sleep(1)
        assert service.end(number) == 0
    assert "Traceback" not in service.process.stderr


@pytest.mark.slow
def test_a_reward_model_is_served_to_those_who_know_the_token(
    bench: Any, tiny_reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(remote.TOKEN_VARIABLE, "secret")
    service = Service(bench, "--model", str(tiny_reward_model), "--normalize_model_scores", "true")
    answers = service.ask("2", "3", "4", "5")
    assert len({answer.reward for answer in answers}) == 4 and all(answer.failure is None for answer in answers)
    assert answers[0].parts == {"model": answers[0].reward}
    monkeypatch.setenv(remote.TOKEN_VARIABLE, "wrong")
    with pytest.raises(RewardError, match="refuses access"):
        service.ask("2")
    service.end(signal.SIGTERM)
    assert "secret" not in service.process.stdout + service.process.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to serve: name a function by --function, or a reward model by --model"),
        (["--function", "exact_macth"], "did you mean 'exact_match'?"),
        (["--function", "exact_match", "--port", "70000"], "--port: found 70000, expected 0 to 65535"),
        (["--function", "exact_match", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--function", "exact_match", "--queue_size", "0"], "--queue_size: found 0, expected at least 1"),
        (["--function", "exact_match", "--workers", "0"], "workers: found 0, expected a whole number of at least 1"),
        (["--function", "exact_match", "--host", "0.0.0.0"], "set the environment variable SLIPSTREAM_REWARD_TOKEN"),
        (["--function", "exact_match", "--host", "no such host"], "cannot listen at no such host, port 8000"),
        (["--function", "exact_match", "--normalize_model_scores", "true"], "--normalize_model_scores needs --model"),
        (["--model", "m", "--options", "{a: 1}"], "--options are passed to a function: name one by --function"),
        (["--model", "/nowhere/at/all", "--port", "0"], "reward.model: no folder '/nowhere/at/all'"),
        (["--function", "json:nothing", "--port", "0"], "nothing"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["serve-reward", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve-reward", "--function", "exact_match", "--port", port]) == 2
    assert f"cannot listen at 127.0.0.1, port {port}: " in capsys.readouterr().err
