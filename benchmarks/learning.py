"""Does every preset learn? Reward before and after a short run, for each preset and seed, through the real engines.

    python benchmarks/learning.py [--presets grpo ppo ...] [--seeds 0 1 2 3 4] [--steps 25] [--output_dir runs/learning]

The task: which of two digits is the larger one? Supervised fine-tuning makes a policy that answers with one of the two
at random, so its reward is about 0.55 and nothing but the reward says which answer is right. A preset has learned
where the mean reward of the last steps reaches `THRESHOLD`.

`ppo_reward_model` is PPO whose reward is a reward model, trained before on pairs of answers to the same questions, with
adaptive control of the KL. Its reward is the model's score, in standard deviations; it has learned where the score has
risen by `SCORE_GAIN` and the KL is within a quarter of its target.

`distillation` learns from a teacher instead of the reward, which is only measured: the start, fine-tuned on the right
answers.

Prints a table to standard error and one JSON line last; the exit code is 1 if a run did not learn.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream import RewardModelConfig, RLConfig, SFTConfig, train_reward_model, train_rl, train_sft
from slipstream.config.presets import PRESETS
from slipstream.config.schema import ScratchPolicyConfig
from slipstream.observe.metrics import read_metrics

THRESHOLD = 0.8
SCORE_GAIN = 0.5
KL_TARGET = 0.5
AVERAGED_STEPS = 5
SFT_STEPS = 250
# With a tail the digit is one token of thirty, and a tail that is not known by heart drowns its signal in noise.
TAIL_SFT_STEPS = 700
MAX_TOKENS = 128
LEARNING_RATE = 1e-3
# GSPO clips the ratio of a whole response to a few ten-thousandths, made for long responses and many small steps.
# The bounds in proportion for responses of two tokens and these larger steps.
OVERRIDES: dict[str, dict[str, Any]] = {"gspo": {"clip_low": 0.1, "clip_high": 0.1}}
# Dynamic sampling stops a run whose policy has no more to learn, and here that is soon.
STEPS = {"dapo": 15}

REWARD_MODEL_CASE = "ppo_reward_model"
REWARD_MODEL_STEPS = 100
TEACHER_STEPS = 100
CASES = (*PRESETS, REWARD_MODEL_CASE)


@dataclass(frozen=True)
class Result:
    """One run. Rewards are means over `AVERAGED_STEPS` steps, and so is `kl`, that of a token to the start.

    `kl` is None without a reference.
    """

    preset: str
    seed: int
    reward_before: float
    reward_after: float
    kl: float | None
    seconds: float

    @property
    def learned(self) -> bool:
        """Whether the reward got past the threshold, or the score of the reward model rose without too high a KL."""
        if self.preset == REWARD_MODEL_CASE:
            assert self.kl is not None
            return self.reward_after - self.reward_before >= SCORE_GAIN and self.kl <= 1.25 * KL_TARGET
        return self.reward_after >= THRESHOLD


def main() -> int:
    """Run what is asked for and compare."""
    arguments = parse_arguments(sys.argv[1:])
    folder = Path(arguments.output_dir)
    results = []
    for seed in arguments.seeds:
        start = make_start(folder / f"start-{seed}", seed)
        for preset in arguments.presets:
            results.append(run_preset(preset, seed, start=start, folder=folder, steps=arguments.steps))
            print(json.dumps(asdict(results[-1])), file=sys.stderr)
    show(results, arguments.presets)
    learned = all(result.learned for result in results)
    line = {"benchmark": "learning", "threshold": THRESHOLD, "results": [asdict(result) for result in results]}
    print(json.dumps(line | {"learned": learned}))
    return 0 if learned else 1


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--output_dir", default=f"runs/learning-{time.strftime('%Y%m%d-%H%M%S')}")
    return parser.parse_args(argv)


def make_start(folder: Path, seed: int, *, tail: str = "") -> Path:
    """The policy that every preset starts from: it knows the form of an answer, and picks one of the two digits.

    `tail` follows the digit in every answer.
    """
    from slipstream.data.tokenizer import train_tokenizer
    from slipstream.models.scratch import create_policy

    folder.mkdir(parents=True)
    rows = list(questions())
    write_rows(folder / "questions.jsonl", rows)
    generator = random.Random(seed)
    answers = [{**row, "response": generator.choice(row["digits"]) + tail} for row in rows for _ in range(20)]
    texts = [row["prompt"] + row["label"] for row in rows]
    create_policy(
        ScratchPolicyConfig(hidden_size=64, layers=2, heads=2, intermediate_size=192, max_tokens=MAX_TOKENS),
        train_tokenizer(texts, ScratchPolicyConfig().vocabulary_size),
        seed=seed,
        folder=folder / "policy",
    )
    settings = {
        "seed": seed,
        "steps": TAIL_SFT_STEPS if tail else SFT_STEPS,
        "batch_size": 128,
        "max_tokens": MAX_TOKENS,
        "output_dir": str(folder / "sft"),
        "model": {"path": str(folder / "policy"), "dtype": "float32"},
        "data": {
            "source": str(write_rows(folder / "answers.jsonl", answers)),
            "response_key": "response",
            "max_prompt_tokens": 32,
        },
        "training": {"learning_rate": 3e-3, "warmup_steps": 20, "zero_stage": 1},
        "tracking": {"tensorboard": False},
    }
    train_sft(SFTConfig.model_validate(settings))
    return folder


def questions() -> Iterator[dict[str, Any]]:
    """All pairs of different digits, in both orders."""
    for first in range(10):
        for second in range(10):
            if first != second:
                yield {
                    "prompt": f"Which is larger, {first} or {second}?",
                    "digits": [str(first), str(second)],
                    "label": str(max(first, second)),
                }


def run_preset(preset: str, seed: int, *, start: Path, folder: Path, steps: int) -> Result:
    """One run of a preset from the start."""
    reward: dict[str, Any] = {"function": "exact_match"}
    algorithm: dict[str, Any] = {"preset": preset, **OVERRIDES.get(preset, {})}
    critic: dict[str, Any] = {"learning_rate": 2 * LEARNING_RATE}
    if algorithm["preset"] == "distillation":
        algorithm["teacher"] = str(make_teacher(folder / f"teacher-{seed}", seed, start=start))
    if preset == REWARD_MODEL_CASE:
        reward_model = make_reward_model(folder / f"reward-model-{seed}", seed, start=start)
        reward = {"model": str(reward_model), "normalize_model_scores": True}
        algorithm = {"preset": "ppo", "kl_coefficient": 0.5, "kl_control": "adaptive", "kl_target": KL_TARGET}
        algorithm["kl_horizon"] = 1000
        critic["path"] = str(reward_model)
    settings: dict[str, Any] = {
        "seed": seed,
        "steps": min(steps, STEPS.get(preset, steps)),
        "optimizer_steps_per_batch": 2,
        "output_dir": str(folder / f"{preset}-{seed}"),
        "model": {"path": str(start / "sft" / "export"), "dtype": "float32"},
        "data": {"source": str(start / "questions.jsonl"), "max_prompt_tokens": 32},
        "reward": reward,
        "rollout": {
            "groups_per_step": 16,
            "samples_per_prompt": 8,
            "max_response_tokens": 6,
            "kv_cache_bytes": 1 << 26,
        },
        "algorithm": algorithm,
        "training": {"learning_rate": LEARNING_RATE, "warmup_steps": 5, "zero_stage": 1},
        "critic": critic,
        "tracking": {"tensorboard": False},
    }
    began = time.monotonic()
    train_rl(RLConfig.model_validate(settings))
    lines = read_metrics(Path(settings["output_dir"]) / "metrics.jsonl")
    # Under dynamic sampling the groups that are trained on are a choice; this is the mean of all.
    rewards = [line.get("dynamic_sampling/reward_mean", line["reward/mean"]) for line in lines]
    kl = [line["policy/kl"] for line in lines[-AVERAGED_STEPS:] if "policy/kl" in line]
    return Result(
        preset=preset,
        seed=seed,
        reward_before=round(mean(rewards[:AVERAGED_STEPS]), 3),
        reward_after=round(mean(rewards[-AVERAGED_STEPS:]), 3),
        kl=round(mean(kl), 4) if kl else None,
        seconds=round(time.monotonic() - began, 1),
    )


def make_teacher(folder: Path, seed: int, *, start: Path) -> Path:
    """A model that knows the right answers, from the policy that the preset starts from."""
    folder.mkdir()
    answers = [{**row, "response": row["label"]} for row in questions()]
    settings = {
        "seed": seed,
        "steps": TEACHER_STEPS,
        "batch_size": 64,
        "max_tokens": 64,
        "output_dir": str(folder / "run"),
        "model": {"path": str(start / "sft" / "export"), "dtype": "float32"},
        "data": {
            "source": str(write_rows(folder / "answers.jsonl", answers)),
            "response_key": "response",
            "max_prompt_tokens": 32,
        },
        "training": {"learning_rate": LEARNING_RATE, "warmup_steps": 10, "zero_stage": 1},
        "tracking": {"tensorboard": False},
    }
    train_sft(SFTConfig.model_validate(settings))
    return folder / "run" / "export"


def make_reward_model(folder: Path, seed: int, *, start: Path) -> Path:
    """A reward model that prefers the larger digit, from the policy that the preset starts from."""
    folder.mkdir()
    pairs = [{**row, "chosen": row["label"], "rejected": min(row["digits"])} for row in questions()]
    settings = {
        "seed": seed,
        "steps": REWARD_MODEL_STEPS,
        "batch_size": 32,
        "max_tokens": 64,
        "output_dir": str(folder / "run"),
        "model": {"path": str(start / "sft" / "export"), "dtype": "float32"},
        "data": {"source": str(write_rows(folder / "pairs.jsonl", pairs)), "max_prompt_tokens": 32},
        "training": {"learning_rate": LEARNING_RATE, "warmup_steps": 10, "zero_stage": 1},
        "tracking": {"tensorboard": False},
    }
    train_reward_model(RewardModelConfig.model_validate(settings))
    return folder / "run" / "export"


def show(results: list[Result], presets: list[str]) -> None:
    """Each preset with its worst and its mean result over the seeds."""
    table = Table(title=f"reward of the first and the last {AVERAGED_STEPS} steps")
    for column in ("preset", "before", "after", "after, worst seed", "learned", "seconds a run"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for preset in presets:
        own = [result for result in results if result.preset == preset]
        table.add_row(
            preset,
            f"{mean(result.reward_before for result in own):.3f}",
            f"{mean(result.reward_after for result in own):.3f}",
            f"{min(result.reward_after for result in own):.3f}",
            f"{sum(result.learned for result in own)} of {len(own)}",
            f"{mean(result.seconds for result in own):.0f}",
        )
    Console(stderr=True).print(table)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
