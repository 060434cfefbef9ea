"""A Ray session with actors that do as they are told."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cluster.session import ClusterSession
from slipstream.config.schema import ClusterConfig
from slipstream.errors import RewardError


class Actor:
    """What an engine may do, good or bad."""

    def start(self, *arguments: Any) -> dict[str, Any]:
        return {"arguments": arguments}

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def echo(self, value: Any) -> Any:
        return value

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def fail_in_our_words(self, text: str) -> None:
        raise RewardError(text)

    def write(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def die(self, last_words: str, code: int) -> None:
        print(last_words, file=sys.stderr, flush=True)
        time.sleep(0.2)
        os._exit(code)

    def count(self, numbers: int) -> Iterator[int]:
        for number in range(numbers):  # noqa: UP028 - Ray sends into generators, a range has no `send`
            yield number
        raise ValueError("out of numbers")

    def shutdown(self) -> None:
        return None


@pytest.fixture(scope="session")
def actor_class() -> type:
    return Actor


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSession]:
    import cloudpickle

    # Ray's workers can't import this file.
    cloudpickle.register_pickle_by_value(sys.modules[Actor.__module__])
    with ClusterSession(ClusterConfig(), log_folder=Path(tmp_path_factory.mktemp("logs"))) as opened:
        yield opened
