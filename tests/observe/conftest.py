"""Run directories with the files a workflow would leave, and a disk that is easily filled."""

import math
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.evaluations import Evaluation, EvaluationSample, EvaluationWriter
from slipstream.observe.ledger import Ledger
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.run_directory import RunDirectory

RL_CONFIG = """\
seed: 1
steps: {steps}
output_dir: {path}
model: {{path: runs/demo/sft/export, dtype: auto}}
data: {{source: 'reasoning_gym:chain_sum', rows: 4000}}
reward: {{function: math}}
rollout: {{engine: vllm, groups_per_step: 64, samples_per_prompt: 8, max_response_tokens: 16}}
algorithm: {{kl_coefficient: 0.001}}
training: {{learning_rate: 0.0003, zero_stage: 2, data_parallel: 1}}
"""
SFT_CONFIG = """\
seed: 1
steps: {steps}
batch_size: 128
output_dir: {path}
model: {{path: runs/demo/policy}}
data: {{source: 'reasoning_gym:chain_sum', response_key: answer}}
training: {{learning_rate: 0.001, zero_stage: 2, data_parallel: 1}}
"""


def evaluation(step: int, accuracy: float, *, response: str = "111", **changes: Any) -> Evaluation:
    """An evaluation with two samples; `changes` are fields of their own."""
    samples = [
        EvaluationSample(prompt="What is 48 + 63?", label="111", response=response, reward=float(response == "111")),
        EvaluationSample(prompt="What is 90 - 15?", label="75", response="75", reward=1.0),
    ]
    settings: dict[str, Any] = {
        "step": step,
        "policy_version": step,
        "dataset": "held-out",
        "prompts": 256,
        "samples_per_prompt": 2,
        "sampled_accuracy": accuracy,
        "greedy_accuracy": min(1.0, accuracy + 0.15),
        "pass_at_k": {"pass@1": accuracy, "pass@2": min(1.0, accuracy + 0.3)},
        "mean_reward": accuracy - 0.01,
        "mean_length": 3.2,
        "max_length": 16,
        "truncated_share": 0.01,
        "greedy_mean_length": 3.0,
        "greedy_max_length": 8,
        "greedy_truncated_share": 0.0,
        "unscored": 0,
        "samples": samples,
    }
    return Evaluation(**settings | changes)


@pytest.fixture
def make_evaluation() -> Callable[..., Evaluation]:
    """`make_evaluation(step, accuracy, **fields)`."""
    return evaluation


def fill_rl_run(path: Path, steps: int = 80) -> RunDirectory:
    """An RL run with metrics, evaluations and a ledger; its lock is held."""
    run = RunDirectory.create(path, RL_CONFIG.format(steps=steps, path=path), "rl")
    chance = random.Random(0)
    metrics, ledger, evaluations = (
        MetricsWriter(run.metrics_path),
        Ledger(run.ledger_path),
        EvaluationWriter(run.evaluations_path),
    )
    evaluations.write(evaluation(0, 0.46, response="101"))
    for step in range(1, steps + 1):
        progress = 1 - math.exp(-3 * step / steps)
        metrics.write(
            step,
            step,
            metrics={
                "reward/mean": 0.46 + 0.45 * progress + chance.gauss(0, 0.02),
                "reward/std": 0.4 - 0.2 * progress,
                "reward_part/correct": 0.4 + 0.4 * progress,
                "reward_part/format": 0.9,
                "response_length/mean": 3.4 + chance.gauss(0, 0.05),
                "policy/kl": 0.02 * progress + 0.001,
                "policy/mismatch_k3": 1e-9 * (1 + chance.random()),
                "policy/entropy": 0.9 * (1 - progress) + 0.1,
                "policy/clip_share": 0.01 + chance.random() * 0.01,
                "policy/loss": chance.gauss(0, 0.02),
                "policy/gradient_norm": 0.5 + chance.random() * 0.3,
                "policy/learning_rate": 3e-4 * min(1, step / 10),
                "time/generate": 0.8 + chance.random() * 0.1,
                "time/score": 0.1,
                "time/train": 1.1 + chance.random() * 0.2,
                "time/publish": 0.15,
                "time/step": 2.3,
                "throughput/tokens_per_s": 1500 + chance.gauss(0, 60),
            },
        )
        for position in range(3):
            ledger.issued(f"0-{step * 3 + position}")
        ledger.trained(f"0-{step * 3}", step)
        ledger.trained(f"0-{step * 3 + 1}", step)
        ledger.filtered(f"0-{step * 3 + 2}", "constant reward")
        if step % 20 == 0:
            evaluations.write(evaluation(step, 0.46 + 0.45 * progress))
    for file in (metrics, ledger, evaluations):
        file.close()
    return run


def fill_sft_run(path: Path, steps: int = 60) -> RunDirectory:
    """An SFT run with training and held-out loss; its lock is held."""
    run = RunDirectory.create(path, SFT_CONFIG.format(steps=steps, path=path), "sft")
    metrics = MetricsWriter(run.metrics_path)
    for step in range(1, steps + 1):
        line = {"loss": 0.4 + 3 * math.exp(-step / 12), "gradient_norm": 1.0, "learning_rate": 1e-3, "time/train": 0.25}
        if step % 20 == 0:
            line["evaluation/loss"] = line["loss"] + 0.05
        metrics.write(step, 0, metrics=line)
    metrics.close()
    return run


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., RunDirectory]]:
    """`make_run(name, fill)` fills a run below the temporary folder and releases its lock at the end."""
    runs: list[RunDirectory] = []

    def make(name: str, fill: Callable[[Path], RunDirectory] = fill_rl_run) -> RunDirectory:
        runs.append(fill(tmp_path / name))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def fill_sft() -> Callable[[Path], RunDirectory]:
    """The filler of an SFT run, for `make_run`."""
    return fill_sft_run


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"mounting a file system is not allowed here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], timeout=20, check=True)
