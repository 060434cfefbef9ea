"""Runs of `slipstream` as a user starts them: as processes, with a tiny policy, watched from outside.

Rewards come from a file written next to the runs: its `digest` gives every answer a number that the answers of a random
policy differ in, and does on request, by a file in its control folder, what a reward should not do.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.observe.metrics import deterministic_part, read_metrics
from slipstream.observe.timeline import read_timeline

SLIPSTREAM = [sys.executable, "-m", "slipstream.cli"]
MARK = "SLIPSTREAM_TEST_RUN"
RUN_LIMIT_S = 400.0

REWARDS = '''\
"""Reward functions of the tests."""

import time
from pathlib import Path


def digest(text, control="", pause_s=0.0, pause_per_token_s=0.0):
    """A number that differs from answer to answer. Hangs, or fails once, when a file in `control` says so."""
    time.sleep(pause_s + pause_per_token_s * text.response_length)
    if control and (Path(control) / "hang").exists():
        (Path(control) / "hanging").touch()
        time.sleep(600)
    if control and (Path(control) / "raise").exists():
        (Path(control) / "raise").unlink()
        raise ValueError("asked to fail")
    return {"digest": sum(text.response.encode()) % 7 / 7}


def misbehave(text):
    """What a reward must not do, chosen by the prompt's first operand; a proper reward for most."""
    first = text.fields["prompt"].split()[2]
    if first == "1":
        raise KeyError("no such answer")
    if first == "2":
        return float("nan")
    if first == "3":
        return [1.0, 0.0]
    if first == "4":
        time.sleep(600)
    return sum(text.response.encode()) % 7 / 7


def always_raise(text):
    raise RuntimeError("the grader is down")


def right_unless_nine(text):
    """A known outcome, whatever the answer is."""
    return 0.0 if text.label == "9" else 1.0
'''


def listen_to_control_c() -> None:
    """In the child: a test run in the background of a shell ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Process:
    """One `slipstream` process and everything it starts, found again by a mark that they inherit."""

    def __init__(self, arguments: Sequence[str], *, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        # Short, because sockets lie in it.
        self.temporary = Path(tempfile.mkdtemp(prefix="st-"))
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        self.popen = subprocess.Popen(
            arguments,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=listen_to_control_c,
        )
        self.seen: set[psutil.Process] = set()
        self.stdout = self.stderr = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    def finish(self, *, limit_s: float = RUN_LIMIT_S) -> int:
        """Wait for the end; the exit code. Fails, and kills, if it takes longer than the limit."""
        try:
            self.stdout, self.stderr = self.popen.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            self.stdout, self.stderr = self.popen.communicate()
            pytest.fail(f"still running after {limit_s:.0f} s\n{self.stdout}\n{self.stderr}")
        return self.popen.returncode

    def look(self) -> set[psutil.Process]:
        """Remember which processes the run consists of now."""
        self.seen |= set(psutil.Process(self.pid).children(recursive=True)) | set(self.marked())
        return self.seen

    def marked(self) -> list[psutil.Process]:
        """The living processes that carry the run's mark in their environment, without the run itself."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != self.pid and process.environ().get(MARK) == self.mark and is_alive(process):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def survivors(self, *, limit_s: float) -> list[str]:
        """Command lines of what is still there of the run after waiting up to the limit."""
        deadline = time.monotonic() + limit_s
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return alive

    def _alive(self) -> list[str]:
        found = []
        for process in self.seen | set(self.marked()):
            try:
                if is_alive(process):
                    found.append(f"{process.pid} {process.name()} {' '.join(process.cmdline())[:120]}")
            except psutil.Error:
                continue
        return found

    def remains(self) -> list[str]:
        """Files that the run left outside its run directory."""
        places = (
            ("/tmp", f"slipstream-ray-{self.pid}-*"),
            ("/dev/shm", f"slipstream-{self.pid}-*"),
            (str(self.temporary), "*"),
        )
        return [str(path) for folder, pattern in places for path in Path(folder).glob(pattern)]

    def find(self, title: str) -> psutil.Process | None:
        """The process of the run whose command line contains `title`, such as 'ray::LearnerRank'."""
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                if title in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        return None

    def interrupt(self, *, group: bool) -> None:
        """Ctrl-C: to the whole process group, as a terminal does it, or to the one process."""
        if group:
            os.killpg(self.pid, signal.SIGINT)
        else:
            os.kill(self.pid, signal.SIGINT)

    def kill_all(self) -> None:
        for process in [self.popen, *self.marked()]:
            try:
                process.kill()
            except (psutil.Error, ProcessLookupError):
                continue


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie and for another process that was given the same id."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


class Workbench:
    """A folder with reward functions, where runs are started."""

    def __init__(self, folder: Path, policy: Path, rows: Path) -> None:
        self.folder = folder
        self.policy = policy
        self.rows = rows
        self.control = folder / "control"
        self.control.mkdir()
        (folder / "rewards.py").write_text(REWARDS)
        self.started: list[Process] = []

    def rl_settings(self, **changes: Any) -> dict[str, Any]:
        """Six steps of four groups of four; `changes` by dotted key with '__' for the dot."""
        settings = {
            "steps": 6,
            "model.path": str(self.policy),
            "model.dtype": "float32",
            "data.source": str(self.rows),
            "data.max_prompt_tokens": 32,
            "reward.function": "rewards.py:digest",
            "rollout.engine": "transformers",
            "rollout.groups_per_step": 4,
            "rollout.samples_per_prompt": 4,
            "rollout.max_response_tokens": 8,
            "rollout.kv_cache_bytes": 1 << 26,
            "training.learning_rate": 3e-4,
            "training.zero_stage": 1,
            "checkpoint.every_steps": 2,
            "tracking.tensorboard": False,
        }
        return settings | {name.replace("__", "."): value for name, value in changes.items()}

    def evaluated_settings(self, **changes: Any) -> dict[str, Any]:
        """The same with held-out prompts and a reward that can be made to hang or fail."""
        evaluation = {
            "evaluation.data.source": str(self.rows),
            "evaluation.data.rows": 6,
            "evaluation.data.max_prompt_tokens": 32,
            "evaluation.every_steps": 3,
            "evaluation.success_reward": 0.5,
            "checkpoint.keep": 3,
            "reward.options.control": str(self.control),
            "reward.timeout_s": 500,
        }
        return self.rl_settings() | evaluation | {name.replace("__", "."): value for name, value in changes.items()}

    def remembering_settings(self) -> dict[str, Any]:
        """PPO through vLLM with a critic that warms up, a steered KL, a reference that is renewed, running moments."""
        return self.evaluated_settings(
            rollout__engine="vllm",
            algorithm="ppo",
            algorithm__kl_coefficient=0.1,
            algorithm__kl_control="adaptive",
            algorithm__kl_horizon=50,
            algorithm__reference_refresh_steps=3,
            algorithm__shaping__normalize=True,
            critic__warmup_steps=1,
            critic__learning_rate=1e-3,
        )

    def sft_settings(self, **changes: Any) -> dict[str, Any]:
        settings = {
            "steps": 4,
            "batch_size": 16,
            "max_tokens": 48,
            "model.path": str(self.policy),
            "model.dtype": "float32",
            "data.source": str(self.rows),
            "data.response_key": "response",
            "training.learning_rate": 1e-3,
            "training.zero_stage": 1,
            "checkpoint.every_steps": 2,
            "tracking.tensorboard": False,
        }
        return settings | {name.replace("__", "."): value for name, value in changes.items()}

    def start(
        self, verb: str, output: str, settings: dict[str, Any], *, extra: Sequence[str] = (), **options: Any
    ) -> Process:
        """`slipstream VERB --json` with these settings, `output` as the run directory, and flags."""
        overrides = [f"--{key}={_as_text(value)}" for key, value in (settings | {"output_dir": output}).items()]
        return self.command(verb, *overrides, "--json", *extra, **options)

    def command(self, *arguments: str, **options: Any) -> Process:
        process = Process([*SLIPSTREAM, *arguments], folder=self.folder, **options)
        self.started.append(process)
        return process

    def script(self, text: str) -> Process:
        """A Python program that uses the package."""
        process = Process([sys.executable, "-c", text], folder=self.folder)
        self.started.append(process)
        return process

    def run(self, verb: str, output: str, settings: dict[str, Any]) -> Process:
        """Start and wait; fails unless the exit code is 0."""
        return succeeded(self.start(verb, output, settings))

    def resume(self, output: str) -> Process:
        return succeeded(self.command("resume", output, "--json"))

    def metrics(self, output: str) -> list[dict[str, Any]]:
        """What does not depend on a clock, line by line; NaN as text, so that equal lines compare equal."""
        lines = [deterministic_part(line) for line in read_metrics(self.folder / output / "metrics.jsonl")]
        return [{name: repr(value) for name, value in line.items()} for line in lines]

    def measured(self, output: str) -> list[dict[str, Any]]:
        """The metrics as they are, line by line."""
        return read_metrics(self.folder / output / "metrics.jsonl")

    def summary(self, output: str) -> dict[str, Any]:
        """What the run found out, as its directory has it."""
        return json.loads((self.folder / output / "summary.json").read_text())

    def spans(self, output: str) -> dict[str, list[tuple[str, float, float]]]:
        """What each lane of the timeline did: (name, start, end) in microseconds."""
        events = read_timeline(self.folder / output / "timeline.json")
        lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        spans: dict[str, list[tuple[str, float, float]]] = {name: [] for name in lanes.values()}
        for event in events:
            if event["ph"] == "X":
                spans[lanes[event["pid"]]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
        return spans

    def evaluations(self, output: str) -> list[str]:
        return (self.folder / output / "evaluations.jsonl").read_text().splitlines()

    def rollouts(self, output: str) -> list[str]:
        """The trajectories that were written down, as text, without the times they took."""
        lines = []
        for path in sorted((self.folder / output / "rollouts").iterdir()):
            for line in path.read_text().splitlines():
                lines.append(json.dumps({k: v for k, v in json.loads(line).items() if k != "seconds"}))
        return lines

    def wait_for_step(self, process: Process, output: str, step: int) -> None:
        """Until the metrics of `step` are written."""
        path = self.folder / output / "metrics.jsonl"
        self.wait_until(process, lambda: path.exists() and path.read_text().count("\n") >= step, f"step {step}")

    def kill_at_step(self, process: Process, output: str, step: int) -> None:
        """Kill the run, with all it has started, once the metrics of `step` are written."""
        self.wait_for_step(process, output, step)
        process.kill_all()
        process.finish()

    def hang_in_step(self, process: Process, output: str, step: int) -> None:
        """Return in the middle of generating `step` or the one after: scoring hangs there until `release`."""
        self.wait_for_step(process, output, step - 1)
        (self.control / "hang").touch()
        self.wait_until(process, (self.control / "hanging").exists, "a hanging reward")
        process.look()

    def release(self) -> None:
        for name in ("hang", "hanging"):
            (self.control / name).unlink(missing_ok=True)

    def events(self, output: str) -> list[dict[str, Any]]:
        """The lines of the ledger."""
        return [json.loads(line) for line in (self.folder / output / "ledger.jsonl").read_text().splitlines()]

    def assert_each_trained_once(self, output: str, *, steps: int, groups_per_step: int) -> None:
        """Every prompt that was issued was trained on exactly once, or dropped with a reason, and no step lacks any."""
        counts = Counter((event["event"], event["group"]) for event in self.events(output))
        assert set(counts.values()) == {1}
        closed = [group for event, group in counts if event != "issued"]
        assert sorted(closed) == sorted(group for event, group in counts if event == "issued")
        trained = [event["step"] for event in self.events(output) if event["event"] == "trained"]
        assert Counter(trained) == dict.fromkeys(range(1, steps + 1), groups_per_step)
        assert [line["step"] for line in self.measured(output)] == list(range(1, steps + 1))
        assert all(event.get("why") for event in self.events(output) if event["event"] in ("failed", "filtered"))

    def wait_until(self, process: Process, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + RUN_LIMIT_S
        while not condition():
            if process.popen.poll() is not None or time.monotonic() > deadline:
                process.kill_all()
                process.finish()
                pytest.fail(f"no {what}: exit code {process.popen.returncode}\n{process.stdout}\n{process.stderr}")
            time.sleep(0.05)

    def stop_all(self) -> None:
        for process in self.started:
            process.kill_all()
            shutil.rmtree(process.temporary, ignore_errors=True)


def succeeded(process: Process) -> Process:
    code = process.finish()
    assert code == 0, f"exit code {code}\n{process.stdout}\n{process.stderr}"
    return process


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.fixture(scope="session")
def make_preferences() -> Callable[[Iterable[int], int], list[dict[str, str]]]:
    """make_preferences(numbers, seed): rows with a better and a worse answer.

    Of two digits the larger one is the better answer, whatever the question, which `numbers` stand for.
    """

    def make(numbers: Iterable[int], seed: int) -> list[dict[str, str]]:
        generator = random.Random(seed)
        rows = []
        for number in numbers:
            worse, better = sorted(generator.sample(range(10), 2))
            question = f"What is {number % 10} + {number // 10}?"
            rows.append({"prompt": question, "chosen": str(better), "rejected": str(worse)})
        return rows

    return make


@pytest.fixture(scope="session")
def make_workbench(tiny_policy: Path, additions: Path) -> Iterator[Callable[[Path], Workbench]]:
    benches: list[Workbench] = []

    def make(folder: Path) -> Workbench:
        benches.append(Workbench(folder, tiny_policy, additions))
        return benches[-1]

    yield make
    for bench in benches:
        bench.stop_all()


@pytest.fixture
def bench(make_workbench: Callable[[Path], Workbench], tmp_path: Path) -> Workbench:
    """A workbench of the test's own."""
    return make_workbench(tmp_path)


@pytest.fixture(scope="session")
def finished_run(
    make_workbench: Callable[[Path], Workbench], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Workbench, Process]:
    """A run of `slipstream rl` that came to its end undisturbed, in folder `run` of its workbench."""
    bench = make_workbench(tmp_path_factory.mktemp("finished"))
    process = bench.start("rl", "run", bench.evaluated_settings(tracking__tensorboard=True))
    bench.wait_for_step(process, "run", 1)
    process.look()
    return bench, succeeded(process)


@pytest.fixture(scope="session")
def finished_vllm_run(
    make_workbench: Callable[[Path], Workbench], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Workbench, Process]:
    """The same with vLLM as the rollout engine, and an algorithm that remembers all that one can between steps."""
    bench = make_workbench(tmp_path_factory.mktemp("finished_vllm"))
    return bench, bench.run("rl", "run", bench.remembering_settings())
