"""`slipstream serve-reward`: a reward function or a reward model behind an address, for `reward.urls` of other runs."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from slipstream.cluster.session import terminate_as_interrupt
from slipstream.config.schema import RewardConfig
from slipstream.errors import ConfigError
from slipstream.rewards.function import check_reward_spec
from slipstream.rewards.remote import TOKEN_VARIABLE

if TYPE_CHECKING:
    from slipstream.rewards.model import RewardModelSpec

GRACE_S = 5.0
"""What is being scored when the service is to end may take so long."""

KEEP_ALIVE_S = 75
"""A connection on which nothing is asked is closed after this: longer than callers keep theirs."""

HIGHEST_PORT = 65535


def serve_reward(config: RewardConfig, *, host: str, port: int, queue_size: int, dtype: str = "auto") -> None:
    """Serve until Ctrl-C or SIGTERM, which end the service within seconds and leave no process behind.

    Port 0 takes a free one. Raises ConfigError for what cannot be served or listened at, ModelError and RewardError as
    `RewardModel.load` and `RewardPool.start` do.
    """
    _check(config, port=port, queue_size=queue_size)
    token = os.environ.get(TOKEN_VARIABLE, "").strip() or None
    with _listen(host, port) as listener:
        if token is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            raise ConfigError(
                f"--host {host} can be reached from other machines: set the environment variable {TOKEN_VARIABLE} to a "
                "secret that callers must send, or leave --host at 127.0.0.1"
            )
        with terminate_as_interrupt():
            _Server(config, listener, token=token, queue_size=queue_size, dtype=dtype).run()


class _Server:
    """The web server around the application, from start to end."""

    def __init__(
        self, config: RewardConfig, listener: socket.socket, *, token: str | None, queue_size: int, dtype: str
    ) -> None:
        self._config = config
        self._listener = listener
        self._token = token
        self._queue_size = queue_size
        self._dtype = dtype
        self._has_served = False

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except KeyboardInterrupt:
            if not self._has_served:
                raise  # it was still starting: that is an interruption, not the end of a service

    async def _serve(self) -> None:
        import uvicorn

        from slipstream.rewards.server import SCORE_PATH, ServiceMetrics, build_application
        from slipstream.rewards.text_scorer import TextScorer

        metrics = ServiceMetrics()
        scorer = TextScorer(self._config, _model_spec(self._config, self._dtype), on_batch=metrics.batch_size.observe)
        try:
            await scorer.start()
            application = build_application(scorer, metrics, token=self._token, queue_size=self._queue_size)
            server = uvicorn.Server(
                uvicorn.Config(
                    application,
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    proxy_headers=False,
                    server_header=False,
                    timeout_keep_alive=KEEP_ALIVE_S,
                    timeout_graceful_shutdown=int(GRACE_S),
                )
            )
            address, port, *_ = self._listener.getsockname()
            shown = f"[{address}]" if ":" in address else address
            self._has_served = True  # before it is said: who reads the line may end the service at once
            print(f"serving at http://{shown}:{port}{SCORE_PATH} (Ctrl-C ends it)", flush=True)
            await server.serve(sockets=[self._listener])
        finally:
            await scorer.close()


def _check(config: RewardConfig, *, port: int, queue_size: int) -> None:
    if config.function is None and config.model is None:
        raise ConfigError("nothing to serve: name a function by --function, or a reward model by --model, or both")
    if config.function is not None:
        check_reward_spec(config.function)
    elif config.options:
        raise ConfigError("--options are passed to a function: name one by --function")
    if config.normalize_model_scores and config.model is None:
        raise ConfigError("--normalize_model_scores needs --model, whose scores it is about")
    if not 0 <= port <= HIGHEST_PORT:
        raise ConfigError(f"--port: found {port}, expected 0 to {HIGHEST_PORT}")
    if queue_size < 1:
        raise ConfigError(f"--queue_size: found {queue_size}, expected at least 1")


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError where that cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}; choose another --host or --port"
        ) from error


def _model_spec(config: RewardConfig, dtype: str) -> RewardModelSpec | None:
    """How the reward model is loaded: its tokenizer is its own, as there is no policy here to share one with."""
    if config.model is None:
        return None
    from slipstream.models.hardware import detect_hardware, resolve_dtype
    from slipstream.rewards.model import RewardModelSpec

    hardware = detect_hardware()
    return RewardModelSpec(
        path=config.model,
        policy_path=config.model,
        dtype=resolve_dtype(dtype, hardware),
        threads=hardware.cpus,
        normalize=config.normalize_model_scores,
        step_aggregation=config.step_aggregation,
    )
