"""Whatever process of a run is killed, at whatever moment: it goes on, and every prompt is trained on exactly once.

`--kills 50 --kill-seed 7` makes a longer run of another sequence of kills. What takes time is not the runs but that
most kills have everything started anew; so the runs are short, and a kill comes as soon as there is something to lose.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

STEPS = 8
GROUPS_PER_STEP = 4
RUN_LIMIT_S = 600.0
# This share of the kills comes when the ledger has got so many lines since the one before, and strikes a run at work,
# however long that takes to start. The others come so soon after the one before that they strike what the run does
# about that: it cleans up, starts anew, has two losses at once.
SHARE_AT_WORK = 0.4
MOST_LINES = 10
SOON_S = 8.0
# What to look for in the command line of a process; the names of Ray's own two come first in it.
TITLES = {
    "command": "slipstream.cli",
    "controller": "slipstream.attempts",
    "learner rank": "ray::LearnerRank",
    "rollout engine": "ray::TransformersEngine",
    "reward engine": "ray::RewardEngine",
    "reward child": "from slipstream.rewards.worker",
    "raylet": "/raylet/raylet",
    "gcs": "/gcs/gcs_server",
}


class Killer:
    """Kills processes of a run that a seed chooses, at moments that it chooses, and remembers which."""

    def __init__(self, kills: int, seed: int) -> None:
        self.left = kills
        self.chance = random.Random(seed)
        self.killed: list[str] = []

    def disturb(self, process: Any, ledger: Path) -> None:
        """Kill until there are no kills left or the run has ended, or the command itself was killed."""
        while self.left and not self._wait(process, ledger):
            everything = [psutil.Process(process.pid), *sorted(process.look(), key=lambda p: p.pid)]
            victims = [(kind, p) for p in everything for kind, title in TITLES.items() if is_of(p, title)]
            if not victims:
                continue
            kind, victim = self.chance.choice(victims)
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue  # It ended by itself.
            self.left -= 1
            self.killed.append(kind)
            if kind == "command":
                return

    def _wait(self, process: Any, ledger: Path) -> bool:
        """True if the run has ended meanwhile."""
        lines = count_lines(ledger) + self.chance.randint(1, MOST_LINES)
        is_at_work = self.chance.random() < SHARE_AT_WORK
        pause_s = RUN_LIMIT_S if is_at_work else self.chance.uniform(0.0, SOON_S)
        deadline = time.monotonic() + pause_s
        while process.popen.poll() is None and time.monotonic() < deadline and count_lines(ledger) < lines:
            time.sleep(0.05)
        return process.popen.poll() is not None


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_of(process: psutil.Process, title: str) -> bool:
    try:
        return title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def assert_nothing_is_left(process: Any) -> None:
    assert process.survivors(limit_s=30) == []
    places = [("/tmp", "slipstream-ray-{}-*"), ("/dev/shm", "slipstream-{}-*")]
    pids = {process.pid, *(member.pid for member in process.seen)}
    left = [path for folder, name in places for pid in pids for path in Path(folder).glob(name.format(pid))]
    assert left == []


def end_of(bench: Any, output: str, settings: dict[str, Any], killer: Killer) -> str:
    """Start a run and disturb it; start it again where the command itself was killed. What it wrote to stderr."""
    restarts = "--max-restarts=100"
    process = bench.start("rl", output, settings, extra=[restarts])
    told = ""
    while True:
        killer.disturb(process, bench.folder / output / "ledger.jsonl")
        code = process.finish(limit_s=RUN_LIMIT_S)
        told += process.stderr
        assert_nothing_is_left(process)
        if code == 0:
            break
        assert killer.killed[-1] == "command" and code == -9, f"exit code {code} after {killer.killed}\n{told}"
        if (bench.folder / output / "config.yaml").exists():
            process = bench.command("resume", output, "--json", restarts)
        else:
            process = bench.start("rl", output, settings, extra=[restarts])
    assert json.loads(process.stdout.splitlines()[-1])["steps"] == STEPS
    return told


def test_whatever_is_killed_every_prompt_is_trained_on_exactly_once(
    bench: Any, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    killer = Killer(pytestconfig.getoption("kills"), pytestconfig.getoption("kill_seed"))
    settings = bench.rl_settings(
        steps=STEPS,
        rollout__engines=2,
        rollout__max_staleness=2,
        checkpoint__every_steps=1,
        reward__options__pause_s=0.1,
        cluster__call_timeout_s=120,
    )
    runs = 0
    while killer.left:
        runs += 1
        output = f"run{runs}"
        before = len(killer.killed)
        told = end_of(bench, output, settings, killer)
        bench.assert_each_trained_once(output, steps=STEPS, groups_per_step=GROUPS_PER_STEP)
        assert max(line["staleness/max"] for line in bench.measured(output)) <= 2
        with capsys.disabled():
            again, anew = told.count("is started again ("), told.count("is there again")
            print(
                f"\nrun {runs}: killed {killer.killed[before:]}: started again {again} times, engines anew {anew} times"
            )
