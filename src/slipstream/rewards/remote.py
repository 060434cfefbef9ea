"""A service over HTTP that scores responses: one request a response, bounded in time and size.

Stands where the pool of child processes stands otherwise, with the same results. A request is a POST of one
`ScoredText` in JSON, its answer what a reward function may return (docs/rewards.md has the protocol and a server). The
addresses take turns, at most `workers` requests at a time to each. A request that gave no reward is sent again, to the
next address, after a pause that doubles; an address that keeps failing is left out for a while (`circuit.py`), and when
all are left out a response fails at once. What is received is data: it is bounded, parsed as JSON and nothing else.
"""

import asyncio
import itertools
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_result,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from slipstream.config.schema import RewardConfig
from slipstream.data.failure import FailureKind, RewardFailure
from slipstream.data.trajectory import Trajectory
from slipstream.errors import RewardError
from slipstream.rewards.child import RewardResult
from slipstream.rewards.circuit import Circuit
from slipstream.rewards.function import Score, ScoredText, UnusableRewardError, check_reward_value
from slipstream.rewards.pool import scored_text

TOKEN_VARIABLE = "SLIPSTREAM_REWARD_TOKEN"
"""Environment variable with the token that is sent to the service; nothing is sent where it is not set."""

LONGEST_ANSWER_BYTES = 1 << 20
"""An answer that is longer is no reward; the rest of it is not read."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
"""The pause before the second attempt, which doubles up to the longest; up to FIRST_PAUSE_S of chance is added."""

TOO_MANY_REQUESTS, SERVER_ERRORS = 429, 500
"""HTTP statuses, this one and those from 500 on, that count against the address as a failed connection does."""

KEYS = ("reward", "parts", "answer")
"""What an answer may hold."""


class RewardService:
    """The addresses of a service behind one method, `score`. To be used from one event loop."""

    def __init__(self, config: RewardConfig) -> None:
        """Connect to nothing yet."""
        self._timeout_s = config.timeout_s
        self._addresses = [_Address(url, config.workers) for url in config.urls]
        self._turns = itertools.cycle(range(len(self._addresses)))
        self._attempts = 1 + (config.retries if config.on_failure == "retry" else 0)
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        self._client = httpx.AsyncClient(
            # Proxies and .netrc of the environment are meant for the open net: rewards go where `urls` says.
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # the deadline is one for the whole request, see _request
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=config.workers * len(config.urls)),
            # Bytes as they come: a compressed answer could grow past any bound.
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
        )

    async def start(self) -> None:
        """Find out whether every address answers: whatever it says to a GET, unless it refuses the token.

        Raises RewardError that names the address.
        """
        for address in self._addresses:
            try:
                async with asyncio.timeout(self._timeout_s), self._client.stream("GET", address.url) as response:
                    status = response.status_code
            except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last: no host name
                reason = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else _text(error)
                raise RewardError(
                    f"reward.urls: the reward service at {address.url} does not answer: {reason}; start it, or correct "
                    "the address"
                ) from error
            if status in (401, 403):
                raise RewardError(
                    f"reward.urls: the reward service at {address.url} refuses access (HTTP {status}); set the "
                    f"environment variable {TOKEN_VARIABLE} to its token where the run is started"
                )

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Return one result per trajectory, in their order. Several calls may run at the same time."""
        return await self.score_texts([scored_text(trajectory) for trajectory in trajectories])

    async def score_texts(self, texts: Sequence[ScoredText]) -> list[RewardResult]:
        """The same for responses without a trajectory behind them."""
        return list(await asyncio.gather(*(self._score(text) for text in texts)))

    async def close(self) -> None:
        """Close all connections. Safe to repeat."""
        await self._client.aclose()

    async def _score(self, text: ScoredText) -> RewardResult:
        """One response's result, after as many attempts as are configured, each at another address."""
        try:
            body = _request_body(text)
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in lists
            message = f"raised: the row cannot be written as JSON: {error}"
            return RewardResult(None, failure=RewardFailure(FailureKind.RAISED, message))
        first = next(self._turns)
        results: list[RewardResult] = []

        async def attempt() -> RewardResult:
            start = (first + len(results)) % len(self._addresses)
            results.append(await self._attempt(body, self._addresses[start:] + self._addresses[:start]))
            return results[-1]

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S) + wait_random(0, FIRST_PAUSE_S),
            retry=retry_if_result(_has_failed),
            retry_error_callback=_last_result,
        )
        result: RewardResult = await retrying(attempt)
        return replace(result, seconds=sum(each.seconds for each in results))

    async def _attempt(self, body: bytes, addresses: "list[_Address]") -> RewardResult:
        """One request to the first of the addresses that is not left out."""
        usable = [address for address in addresses if not address.circuit.is_open]
        # One that is being probed may be there again: it is waited for where there is no other.
        for address in sorted(usable, key=lambda address: address.circuit.is_probing):
            async with address.places:
                await address.wait_for_probe()
                if address.circuit.admit():  # it may have failed for others while this response waited
                    return await self._timed_request(address, body)
        left_out = ", ".join(f"{address.url} ({address.last_failure})" for address in self._addresses)
        message = f"unreachable: every address of reward.urls is left out after repeated failures: {left_out}"
        return RewardResult(None, failure=RewardFailure(FailureKind.UNREACHABLE, message))

    async def _timed_request(self, address: "_Address", body: bytes) -> RewardResult:
        started = time.perf_counter()
        address.begin()
        try:
            result = await self._request(address, body)
        except BaseException:
            address.circuit.release()
            raise
        finally:
            address.end()
        return replace(result, seconds=time.perf_counter() - started)

    async def _request(self, address: "_Address", body: bytes) -> RewardResult:
        """Send one request and read its answer within the deadline; tell the address's circuit how it went."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status, content = await self._exchange(address.url, body)
        except TimeoutError:
            message = f"timed out after {self._timeout_s:g} s: {address.url}"
            return address.failed(RewardFailure(FailureKind.TIMED_OUT, message))
        except httpx.HTTPError as error:
            return address.failed(RewardFailure(FailureKind.UNREACHABLE, f"unreachable: {address.url}: {_text(error)}"))
        if status != 200:
            failure = RewardFailure(FailureKind.REFUSED, f"refused: {address.url} answered with HTTP status {status}")
            if status == TOO_MANY_REQUESTS or status >= SERVER_ERRORS:
                return address.failed(failure)
            address.circuit.success()
            return RewardResult(None, failure=failure)
        address.circuit.success()
        try:
            score, reads_answers = _read_answer(content)
        except UnusableRewardError as error:
            return RewardResult(None, failure=RewardFailure(FailureKind.RETURNED, f"{error} ({address.url})"))
        return RewardResult(score.reward, score.parts, answer=score.answer, reads_answers=reads_answers)

    async def _exchange(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Status and content of the answer to one request; one byte more than allowed of content that is too long."""
        content = bytearray()
        headers = {"Content-Type": "application/json"}
        async with self._client.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code == 200:
                async for piece in response.aiter_raw():
                    content += piece[: LONGEST_ANSWER_BYTES + 1 - len(content)]
                    if len(content) > LONGEST_ANSWER_BYTES:
                        break
            return response.status_code, bytes(content)


class _Address:
    """One address of the service: how many requests it may have at a time, and whether it is left out."""

    def __init__(self, url: str, places: int) -> None:
        self.url = url
        self.places = asyncio.Semaphore(places)
        self.circuit = Circuit()
        self.last_failure = "no failure"
        self._no_probe = asyncio.Event()
        self._no_probe.set()

    async def wait_for_probe(self) -> None:
        """Until the address is not being probed."""
        while self.circuit.is_probing:
            await self._no_probe.wait()

    def begin(self) -> None:
        """A request begins, which may be a probe."""
        if self.circuit.is_probing:
            self._no_probe.clear()

    def end(self) -> None:
        """A request has ended, the probe or one from before it."""
        if not self.circuit.is_probing:
            self._no_probe.set()

    def failed(self, failure: RewardFailure) -> RewardResult:
        """The result of a request that this address did not do its part in."""
        self.circuit.failure()
        self.last_failure = failure.message
        return RewardResult(None, failure=failure)


def _request_body(text: ScoredText) -> bytes:
    """What is sent: the fields of a `ScoredText` in strict JSON, without the token ids."""
    record = {
        "prompt": text.prompt,
        "response": text.response,
        "label": text.label,
        "fields": text.fields,
        "finish_reason": text.finish_reason,
        "response_length": text.response_length,
        "turns": [{"role": turn.role, "text": turn.text} for turn in text.turns],
    }
    return json.dumps(_plain(record), allow_nan=False).encode("ascii")


def _plain(value: Any) -> Any:
    """A value as JSON can say it: NaN and infinity as null, dates and other objects as their text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _read_answer(content: bytes) -> tuple[Score, bool]:
    """The score in the content of an answer, and whether it speaks of answers. UnusableRewardError if it has none."""
    if len(content) > LONGEST_ANSWER_BYTES:
        raise UnusableRewardError(f"returned more than {LONGEST_ANSWER_BYTES} bytes")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnusableRewardError(f"returned {_shown(content)}, expected JSON: {error}") from error
    if not isinstance(answer, dict) or "reward" not in answer:
        raise UnusableRewardError(f"returned {_shown(content)}, expected a JSON object with 'reward'")
    unknown = [name for name in answer if name not in KEYS]
    if unknown:
        raise UnusableRewardError(f"returned the unknown key {unknown[0]!r}, expected {', '.join(KEYS)}")
    parts = answer.get("parts") or {}
    if not isinstance(parts, dict):
        raise UnusableRewardError("returned parts that are no JSON object of numbers")
    return check_reward_value(Score(answer["reward"], parts, answer.get("answer"))), "answer" in answer


def _shown(content: bytes) -> str:
    """The beginning of what was received, for a message."""
    return ascii(content[:40].decode("utf-8", errors="replace")) + ("..." if len(content) > 40 else "")


def _text(error: Exception) -> str:
    """An error of the network in words; some have no text of their own."""
    return str(error) or type(error).__name__


def _has_failed(result: RewardResult) -> bool:
    return result.failure is not None


def _last_result(state: RetryCallState) -> Any:
    """What the last attempt returned: giving up is no exception here."""
    assert state.outcome is not None
    return state.outcome.result()
