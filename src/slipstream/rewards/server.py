"""The reward service as a web application: the protocol of `remote.py`, seen from the other side.

POST /score is given one response in JSON and answers with its reward; GET /health says that the service is there, GET
/metrics what it has done, for Prometheus. What is received is data: bounded, parsed as JSON, checked against a schema.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.data.turn import Turn
from slipstream.observe.logs import get_logger
from slipstream.rewards.child import RewardResult
from slipstream.rewards.function import ScoredText

SCORE_PATH, HEALTH_PATH, METRICS_PATH = "/score", "/health", "/metrics"

LONGEST_REQUEST_BYTES = 16 << 20
"""A request that is longer is refused; the rest of it is not read."""

RECEIVE_TIMEOUT_S = 30.0
"""A request must have arrived within this time."""

OK, MALFORMED, UNAUTHORIZED, TOO_SLOW, TOO_LONG, FAILED, BROKEN, OVERLOADED = 200, 400, 401, 408, 413, 422, 500, 503
ABANDONED = 499  # never sent: the caller has gone
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)

logger = get_logger("reward service")


class Scorer(Protocol):
    """What the service scores with."""

    async def score(self, text: ScoredText) -> RewardResult:
        """The result of one text."""
        ...


class ServiceMetrics:
    """What the service counts, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "slipstream_reward"
        self.requests = Counter(f"{prefix}_requests", "Requests by HTTP status.", ["status"], registry=registry)
        self.failures = Counter(f"{prefix}_failures", "Requests without a reward.", ["kind"], registry=registry)
        self.seconds = Histogram(f"{prefix}_seconds", "From a request to its answer.", registry=registry)
        self.queue_depth = Gauge(f"{prefix}_queue_depth", "Requests that wait or are scored.", registry=registry)
        self.batch_size = Histogram(
            f"{prefix}_batch_size", "Responses the model scores at a time.", buckets=BATCH_SIZES, registry=registry
        )


class _Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    text: str


class _ScoreRequest(BaseModel):
    """What a request may hold: the fields of a `ScoredText`, of which only the response is needed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    response: str
    prompt: str = ""
    label: Any = None
    fields: dict[str, Any] = {}
    finish_reason: str = "stop"
    response_length: int = 0
    turns: list[_Turn] = []

    def scored_text(self) -> ScoredText:
        turns = tuple(Turn(turn.role, turn.text) for turn in self.turns)
        return ScoredText(
            prompt=self.prompt,
            response=self.response,
            label=self.label,
            fields=self.fields,
            finish_reason=self.finish_reason,
            response_length=self.response_length,
            turns=turns,
        )


class _RefusedError(Exception):
    """The request is answered with this HTTP status, this kind of failure and this message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def build_application(scorer: Scorer, metrics: ServiceMetrics, *, token: str | None, queue_size: int) -> Starlette:
    """The application. With a `token` everything but /health wants it as a bearer token.

    At most `queue_size` requests wait or are scored at a time; one more is answered with status 503.
    """
    service = _Service(scorer, metrics, queue_size)
    routes = [
        Route(SCORE_PATH, service.score, methods=["POST"]),
        Route(HEALTH_PATH, service.health, methods=["GET"]),
        Route(METRICS_PATH, service.metrics, methods=["GET"]),
    ]
    middleware = [] if token is None else [Middleware(_BearerToken, token=token, metrics=metrics)]
    return Starlette(routes=routes, middleware=middleware)


class _Service:
    def __init__(self, scorer: Scorer, metrics: ServiceMetrics, queue_size: int) -> None:
        self._scorer = scorer
        self._metrics = metrics
        self._queue_size = queue_size
        self._under_way = 0

    async def score(self, request: Request) -> Response:
        """Answer one request; whatever is wrong with it, the answer is JSON that says so."""
        started = time.perf_counter()
        try:
            content = await self._scored(request)
            status = OK
        except _RefusedError as refusal:
            status, content = self._refused(refusal)
        except asyncio.CancelledError:  # only the end of the server does this, and still lets the answer go out
            status, content = self._refused(_RefusedError(OVERLOADED, "ending", "the service is being ended"))
        self._metrics.requests.labels(str(status)).inc()
        self._metrics.seconds.observe(time.perf_counter() - started)
        return JSONResponse(content, status, headers={"Retry-After": "1"} if status == OVERLOADED else None)

    async def health(self, _: Request) -> Response:
        """The service is there."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """The counters, in the text format of Prometheus."""
        return PlainTextResponse(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _refused(self, refusal: _RefusedError) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer to a request without a reward, which is counted and logged."""
        self._metrics.failures.labels(refusal.kind).inc()
        logger.warning("no reward", status=refusal.status, kind=refusal.kind, reason=str(refusal))
        return refusal.status, {"error": {"kind": refusal.kind, "message": str(refusal)}}

    async def _scored(self, request: Request) -> dict[str, Any]:
        if self._under_way >= self._queue_size:
            raise _RefusedError(
                OVERLOADED, "overloaded", f"{self._under_way} requests are waiting, and no more may: try again later"
            )
        self._under_way += 1
        self._metrics.queue_depth.set(self._under_way)
        try:
            text = _parse(await _body(request))
            return _content(await self._result(request, text))
        finally:
            self._under_way -= 1
            self._metrics.queue_depth.set(self._under_way)

    async def _result(self, request: Request, text: ScoredText) -> RewardResult:
        """The result, unless the caller goes away before it is there: then nobody computes it any more."""
        scoring = asyncio.ensure_future(self._scorer.score(text))
        caller_gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((scoring, caller_gone), return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise _RefusedError(ABANDONED, "abandoned", "the caller has gone before there was a reward")
            return scoring.result()
        except _RefusedError:
            raise
        except Exception as error:  # the caller is told, the service goes on, and the log says what broke
            raise _RefusedError(BROKEN, "broken", f"scoring broke down: {type(error).__name__}: {error}") from error
        finally:
            scoring.cancel()
            caller_gone.cancel()
            await asyncio.gather(scoring, caller_gone, return_exceptions=True)


async def _body(request: Request) -> bytes:
    """The whole body. Raises _RefusedError for one that is too long or comes too slowly."""
    body = bytearray()
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > LONGEST_REQUEST_BYTES:
                    message = f"the request has more than {LONGEST_REQUEST_BYTES} bytes"
                    raise _RefusedError(TOO_LONG, "too_long", message)
    except TimeoutError:
        message = f"the request did not arrive within {RECEIVE_TIMEOUT_S:g} s"
        raise _RefusedError(TOO_SLOW, "too_slow", message) from None
    except ClientDisconnect:
        raise _RefusedError(ABANDONED, "abandoned", "the caller has gone in the middle of the request") from None
    return bytes(body)


def _parse(body: bytes) -> ScoredText:
    """The text in a request. Raises _RefusedError that says where and what is wrong."""
    try:
        return _ScoreRequest.model_validate_json(body).scored_text()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _RefusedError(MALFORMED, "malformed", f"{place}: {first['msg']}" if place else first["msg"]) from None


def _content(result: RewardResult) -> dict[str, Any]:
    """The answer of a result. Raises _RefusedError where there is no reward."""
    if result.failure is not None:
        raise _RefusedError(FAILED, str(result.failure.kind), str(result.failure))
    content: dict[str, Any] = {"reward": result.reward, "parts": result.parts}
    return content | ({"answer": result.answer} if result.reads_answers else {})


class _BearerToken:
    """Lets through who knows the token. The comparison takes as long for every wrong one."""

    def __init__(self, application: ASGIApp, token: str, metrics: ServiceMetrics) -> None:
        self._application = application
        self._expected = f"Bearer {token}".encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != HEALTH_PATH:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                self._metrics.requests.labels(str(UNAUTHORIZED)).inc()
                self._metrics.failures.labels("unauthorized").inc()
                message = "the token is missing or wrong: send it as the header Authorization: Bearer TOKEN"
                content = {"error": {"kind": "unauthorized", "message": message}}
                response = JSONResponse(content, UNAUTHORIZED, headers={"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._application(scope, receive, send)
