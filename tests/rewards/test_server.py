"""The reward service's application: what each request is answered with, and what is counted."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from slipstream.data.failure import FailureKind, RewardFailure
from slipstream.rewards import server
from slipstream.rewards.child import RewardResult
from slipstream.rewards.function import ScoredText
from slipstream.rewards.server import ServiceMetrics, build_application

REQUEST = {
    "prompt": "1 + 1 =",
    "response": "2",
    "label": "2",
    "fields": {"prompt": "1 + 1 =", "label": "2"},
    "finish_reason": "stop",
    "response_length": 3,
    "turns": [{"role": "prompt", "text": "1 + 1 ="}, {"role": "assistant", "text": "2"}],
}


class Rule:
    """Scores with a function of the text, and remembers the texts."""

    def __init__(self, rule: Callable[[ScoredText], RewardResult | Awaitable[RewardResult]]) -> None:
        self.rule = rule
        self.seen: list[ScoredText] = []

    async def score(self, text: ScoredText) -> RewardResult:
        self.seen.append(text)
        result = self.rule(text)
        return result if isinstance(result, RewardResult) else await result


def right(text: ScoredText) -> RewardResult:
    return RewardResult(float(text.response == text.label), {"right": 1.0})


class Service:
    """A client of an application in this process, and the application's metrics."""

    def __init__(self, rule: Callable[..., Any] = right, *, token: str | None = None, queue_size: int = 4) -> None:
        self.rule = Rule(rule)
        self.numbers = ServiceMetrics()
        application = build_application(self.rule, self.numbers, token=token, queue_size=queue_size)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=application), base_url="http://test", timeout=30
        )

    async def post(self, content: Any = None, **headers: str) -> httpx.Response:
        body = json.dumps(REQUEST if content is None else content) if not isinstance(content, bytes) else content
        return await self.client.post("/score", content=body, headers=headers)

    def count(self, name: str, **labels: str) -> float:
        return self.numbers.registry.get_sample_value(f"slipstream_reward_{name}", labels) or 0.0


def ask(content: Any = None, **options: Any) -> httpx.Response:
    return asyncio.run(Service(**options).post(content))


def test_a_request_becomes_the_text_that_was_sent() -> None:
    service = Service()
    answer = asyncio.run(service.post())
    assert (answer.status_code, answer.json()) == (200, {"reward": 1.0, "parts": {"right": 1.0}})
    [text] = service.rule.seen
    assert (text.prompt, text.response, text.label, text.fields) == ("1 + 1 =", "2", "2", REQUEST["fields"])
    assert (text.finish_reason, text.response_length) == ("stop", 3)
    assert [(turn.role, turn.text) for turn in text.turns] == [("prompt", "1 + 1 ="), ("assistant", "2")]


def test_only_the_response_is_needed() -> None:
    assert ask({"response": "2"}).json()["reward"] == 0.0


def test_answers_are_sent_only_by_rewards_that_read_them() -> None:
    assert "answer" not in ask().json()
    assert ask(rule=lambda _: RewardResult(1.0, answer=None, reads_answers=True)).json()["answer"] is None
    assert ask(rule=lambda _: RewardResult(1.0, answer="2", reads_answers=True)).json()["answer"] == "2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"response": "2', "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"", "Invalid JSON"),
        ([], "Input should be an object"),
        ({"label": "2"}, "response: Field required"),
        ({"response": 2}, "response: Input should be a valid string"),
        ({"response": "2", "reward": 1.0}, "reward: Extra inputs are not permitted"),
        ({"response": "2", "turns": [{"role": "user"}]}, "turns.0.text: Field required"),
        (b'{"response": "\\ud800"}', "Invalid JSON"),
    ],
)
def test_a_malformed_request_is_answered_with_what_is_wrong(content: Any, message: str) -> None:
    service = Service()
    answer = asyncio.run(service.post(content))
    assert answer.status_code == 400
    assert answer.json()["error"]["kind"] == "malformed" and message in answer.json()["error"]["message"]
    assert "Traceback" not in answer.text and service.rule.seen == []
    assert service.count("failures_total", kind="malformed") == service.count("requests_total", status="400") == 1


def test_a_request_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LONGEST_REQUEST_BYTES", 1000)
    assert ask({"response": "2" * 900}).status_code == 200
    answer = ask({"response": "2" * 1000})
    assert (answer.status_code, answer.json()["error"]["kind"]) == (413, "too_long")


def test_a_request_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RECEIVE_TIMEOUT_S", 0.05)

    async def slowly() -> Any:
        yield b'{"response"'
        await asyncio.sleep(30)

    async def main() -> httpx.Response:
        return await Service().client.post("/score", content=slowly())

    assert asyncio.run(asyncio.wait_for(main(), 20)).status_code == 408


@pytest.mark.parametrize("kind", [FailureKind.RAISED, FailureKind.TIMED_OUT, FailureKind.KILLED, FailureKind.RETURNED])
def test_a_failure_of_the_reward_is_no_fault_of_the_address(kind: FailureKind) -> None:
    """Status 422: a client's circuit breaker counts only 429 and from 500 on against an address."""
    service = Service(lambda _: RewardResult(None, failure=RewardFailure(kind, f"{kind}: so it was")))
    answer = asyncio.run(service.post())
    assert (answer.status_code, answer.json()) == (422, {"error": {"kind": str(kind), "message": f"{kind}: so it was"}})
    assert service.count("failures_total", kind=str(kind)) == 1


def test_a_scorer_that_breaks_is_status_500_and_the_service_goes_on() -> None:
    def broken(text: ScoredText) -> RewardResult:
        raise RuntimeError("out of memory") if text.response == "2" else ValueError("other")

    async def main() -> None:
        service = Service(broken)
        for content, message in (({"response": "2"}, "RuntimeError: out of memory"), ({"response": "3"}, "ValueError")):
            answer = await service.post(content)
            assert answer.status_code == 500 and message in answer.json()["error"]["message"]
        assert service.count("queue_depth") == 0

    asyncio.run(main())


def test_a_full_queue_is_status_503_until_there_is_room() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def wait(_: ScoredText) -> RewardResult:
            await gate.wait()
            return RewardResult(1.0)

        service = Service(wait, queue_size=2)
        waiting = [asyncio.create_task(service.post()) for _ in range(2)]
        while service.count("queue_depth") < 2:
            await asyncio.sleep(0.01)
        refused = await service.post()
        assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        assert (await service.post()).status_code == 200
        assert service.count("requests_total", status="503") == 1

    asyncio.run(asyncio.wait_for(main(), 30))


def test_nobody_computes_what_nobody_waits_for() -> None:
    """The application is called as a server calls it: the caller sends a whole request and goes away."""

    async def main() -> None:
        cancelled = asyncio.Event()

        async def endless(_: ScoredText) -> RewardResult:
            try:
                await asyncio.sleep(600)
            finally:
                cancelled.set()
            return RewardResult(1.0)

        numbers = ServiceMetrics()
        application = build_application(Rule(endless), numbers, token=None, queue_size=1)
        messages = [
            {"type": "http.request", "body": b'{"response": "2"}', "more_body": False},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(_: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/score", "headers": [], "query_string": b""}
        await application(scope, receive, send)
        assert cancelled.is_set()
        assert numbers.registry.get_sample_value("slipstream_reward_failures_total", {"kind": "abandoned"}) == 1
        assert numbers.registry.get_sample_value("slipstream_reward_queue_depth") == 0

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer secre", "Bearer secret2", "secret", "Basic secret"]
)
def test_without_the_token_nothing_is_scored(authorization: str | None) -> None:
    async def main() -> None:
        service = Service(token="secret")
        headers = {} if authorization is None else {"Authorization": authorization}
        for method, path in (("POST", "/score"), ("GET", "/score"), ("GET", "/metrics"), ("GET", "/other")):
            answer = await service.client.request(method, path, json=REQUEST, headers=headers)
            assert (answer.status_code, answer.json()["error"]["kind"]) == (401, "unauthorized")
            assert "secret" not in answer.text.replace(str(authorization), "")
        assert service.rule.seen == []
        assert service.count("failures_total", kind="unauthorized") == 4

    asyncio.run(main())


def test_with_the_token_all_is_as_without_one_and_health_needs_none() -> None:
    async def main() -> None:
        service = Service(token="secret")
        assert (await service.post(Authorization="Bearer secret")).json()["reward"] == 1.0
        assert (await service.client.get("/health")).json() == {"status": "ok"}

    asyncio.run(main())


def test_metrics_are_in_the_format_of_prometheus() -> None:
    async def main() -> None:
        service = Service()
        await service.post()
        service.numbers.batch_size.observe(3)
        answer = await service.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        lines = answer.text.splitlines()
        for line in (
            'slipstream_reward_requests_total{status="200"} 1.0',
            "slipstream_reward_seconds_count 1.0",
            "slipstream_reward_queue_depth 0.0",
            'slipstream_reward_batch_size_bucket{le="2.0"} 0.0',
            'slipstream_reward_batch_size_bucket{le="4.0"} 1.0',
        ):
            assert line in lines

    asyncio.run(main())
