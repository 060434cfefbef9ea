"""A reward that takes its time, as a judge, a search or a tool does: exact match after a log-normal wait.

The wait has median `MEDIAN_S` and 99th percentile `PERCENTILE_99_S`, and is given up at a limit, as in every real
service; at `LIMIT_S`, twice the 99th percentile, that leaves both as they are and concerns 0.2 % of the answers.

How long an answer waits depends on the seed, the prompt, and how often that prompt was asked about before, and on
nothing else: runs that train on the same prompts in the same order wait for the same times, step by step, whichever
answer arrives first.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from pathlib import Path
from typing import Any

MEDIAN_S = 0.2
PERCENTILE_99_S = 4.0
LIMIT_S = 8.0
# Of the normal distribution; `statistics` has it too, but every process that scores would load that.
NORMAL_PERCENTILE_99 = 2.3263478740408408
SPREAD = math.log(PERCENTILE_99_S / MEDIAN_S) / NORMAL_PERCENTILE_99


def latency(prompt: str, number: int, *, seed: int, scale: float = 1.0, limit_s: float | None = LIMIT_S) -> float:
    """Seconds that answer `number` to a prompt waits. `scale` multiplies all times, also the limit."""
    chance = random.Random(f"{seed}/{number}/{prompt}")
    drawn = chance.lognormvariate(math.log(MEDIAN_S), SPREAD)
    return scale * (drawn if limit_s is None else min(limit_s, drawn))


def count(prompt: str, folder: Path) -> int:
    """How often a prompt was asked about before, in whichever process; this time is counted from now on.

    A file for each prompt grows by a byte each time. Appending is atomic, and leaves the place of one's own byte.
    """
    name = hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()
    with (folder / name).open("ab", buffering=0) as file:
        file.write(b".")
        return file.tell() - 1


def slow_match(text: Any, folder: str, seed: int, scale: float, limit_s: float | None) -> float:
    """The reward function. `folder` must exist, and be that of one run."""
    number = count(text.prompt, Path(folder))
    time.sleep(latency(text.prompt, number, seed=seed, scale=scale, limit_s=limit_s))
    return float(text.response.startswith(text.label))
