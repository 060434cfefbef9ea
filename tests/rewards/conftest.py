"""What the reward tests share: trajectories with a given response, pools that are closed whatever happens, servers."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.schema import RewardConfig
from slipstream.data.trajectory import Trajectory
from slipstream.data.turn import Turn
from slipstream.rewards.pool import RewardPool


def make_trajectory(response: str, *, label: Any = "2", index: int = 0, fields: dict | None = None) -> Trajectory:
    """A trajectory of two prompt tokens and two response tokens."""
    return Trajectory(
        group_id="0-0",
        sample_index=index,
        tokens=np.arange(4),
        loss_mask=np.array([False, False, True, True]),
        rollout_log_probs=np.zeros(4, dtype=np.float32),
        versions=np.array([-1, -1, 0, 0]),
        finish_reason="stop",
        prompt_text="1 + 1 =",
        response_text=response,
        label=label,
        fields=fields or {},
        turns=(Turn("prompt", "1 + 1 ="), Turn("assistant", response)),
    )


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def with_pool(tmp_path: Path) -> Callable[..., Any]:
    """Run a coroutine function on a pool whose reward function is the source text given, in `reward.py:reward`."""

    def run(source: str, use: Callable[[RewardPool], Awaitable[Any]], **config: Any) -> Any:
        (tmp_path / "reward.py").write_text(source)
        settings = {"function": "reward.py:reward", "on_failure": "drop_group", "timeout_s": 20.0} | config

        async def main() -> Any:
            pool = RewardPool(RewardConfig(**settings), working_directory=str(tmp_path))
            try:
                return await use(pool)
            finally:
                await pool.close()

        return asyncio.run(asyncio.wait_for(main(), 60))

    return run


@pytest.fixture
def score(with_pool: Callable[..., Any]) -> Callable[..., Any]:
    """Score some responses with the reward function whose source is given; returns the results."""

    def run(source: str, *responses: str, **config: Any) -> Any:
        trajectories = [make_trajectory(response, index=i) for i, response in enumerate(responses)]
        return with_pool(source, lambda pool: pool.score(trajectories), **config)

    return run


Reply = tuple[int, bytes] | None


class Server:
    """A server on this machine that answers a POST as `reply` says, and does not answer where that is None."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply]) -> None:
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_a_time = 0
        self.extra_headers: dict[str, str] = {}
        self.get_status = 200
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._at_a_time = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(server.get_status)
                self.end_headers()

            def do_POST(self) -> None:
                server.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append(request)
            self.headers.append(dict(handler.headers))
            self._at_a_time += 1
            self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
        reply = self.reply(request)
        with self._lock:
            self._at_a_time -= 1
        if reply is None:
            self._released.wait(30)
            return
        handler.send_response(reply[0])
        for name, value in self.extra_headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(reply[1])

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def make_server() -> Iterator[Callable[[Callable[[dict[str, Any]], Reply]], Server]]:
    servers: list[Server] = []

    def start(reply: Callable[[dict[str, Any]], Reply]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
