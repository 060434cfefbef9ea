"""Time of a GRPO step with vLLM and with plain transformers generation, everything else equal, in one run.

    python benchmarks/rollout_engines.py MODEL DATA.jsonl [--steps 4] [--prompt_tokens 64] [--response_tokens 32]

Uses prompts of at most `--prompt_tokens`. Prints a table to standard error and one JSON line last: medians over the
steps after the first, which warms up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from slipstream import RLConfig, train_rl
from slipstream.observe.metrics import read_metrics

GROUPS, SAMPLES = 2, 8
PHASES = ("time/generate", "time/prepare", "time/train", "time/publish", "time/step")


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--response_tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    results = {}
    for engine in ("vllm", "transformers"):
        with tempfile.TemporaryDirectory() as folder:
            config = step_config(arguments, engine, Path(folder) / "run")
            train_rl(config, reward=response_length)
            lines = read_metrics(Path(config.output_dir) / "metrics.jsonl")[1:]
        results[engine] = {phase: statistics.median(line[phase] for line in lines) for phase in PHASES}
        shown = "  ".join(f"{phase.removeprefix('time/')} {results[engine][phase]:.2f} s" for phase in PHASES)
        print(f"{engine:>12}  {shown}", file=sys.stderr)
    ratio = results["transformers"]["time/step"] / results["vllm"]["time/step"]
    print(json.dumps({"benchmark": "rollout_engines", **results, "step_speedup_of_vllm": round(ratio, 2)}))


def step_config(arguments: argparse.Namespace, engine: str, output_dir: Path) -> RLConfig:
    """Two groups of eight, as small as a GRPO step gets."""
    settings: dict[str, Any] = {
        "steps": arguments.steps + 1,
        "output_dir": str(output_dir),
        "model": {"path": arguments.model, "dtype": arguments.dtype},
        "data": {"source": arguments.data, "max_prompt_tokens": arguments.prompt_tokens},
        "rollout": {
            "engine": engine,
            "groups_per_step": GROUPS,
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": arguments.response_tokens,
        },
        "tracking": {"tensorboard": False},
    }
    return RLConfig.model_validate(settings)


def response_length(text: Any) -> float:
    """A reward that differs within a group and asks nothing of the model."""
    return float(text.response_length + text.response.count("a") / 100)


if __name__ == "__main__":
    main()
