"""The verbs that are no workflows: their arguments, and the one function each of them calls.

What takes a configuration is in `cli.py`. What a verb needs is imported when it runs, so that every `--help` answers
at once.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRADE_KEYS = ("workers", "timeout_s", "memory_bytes", "options")
SERVICE_KEYS = ("function", "model", "step_aggregation", "normalize_model_scores", *GRADE_KEYS)


@dataclass(frozen=True)
class Verb:
    """`add_arguments` fills the verb's parser, `run` does it and returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    description: str | None = None


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")


def _report(options: argparse.Namespace) -> int:
    from slipstream.observe.report import write_report

    print(write_report(Path(options.run_dir)))
    return 0


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="end with the findings as one line of JSON")


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console

    from slipstream.observe.files import to_json
    from slipstream.workflows.doctor import examine, print_diagnosis

    console = Console(stderr=options.json)
    console.print("Importing every engine once; this takes up to a minute or two.")
    diagnosis = examine()
    print_diagnosis(diagnosis, console)
    if options.json:
        print(to_json(diagnosis.as_json()))
    return 0 if diagnosis.usable else 1


def _grade_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file of JSON lines")
    parser.add_argument("--verifier", default="math", help="what reward.function takes (default: math)")
    for key in GRADE_KEYS:
        parser.add_argument(f"--{key}", metavar="VALUE", help=f"as reward.{key}")


def _grade(options: argparse.Namespace) -> int:
    from slipstream.workflows.grade import grade

    config = _reward_config(options, GRADE_KEYS)
    grade(Path(options.file), config.model_copy(update={"function": options.verifier}), sys.stdout.buffer)
    return 0


def _serve_reward_arguments(parser: argparse.ArgumentParser) -> None:
    for key in SERVICE_KEYS:
        parser.add_argument(f"--{key}", metavar="VALUE", help=f"as reward.{key}")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="type of the model's weights, as model.dtype (default: auto)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at, 0 for any (default: 8000)")
    parser.add_argument(
        "--queue_size", type=int, default=256, help="requests that may wait or be scored at a time (default: 256)"
    )


def _serve_reward(options: argparse.Namespace) -> int:
    from slipstream.workflows.serve_reward import serve_reward

    config = _reward_config(options, SERVICE_KEYS)
    serve_reward(config, host=options.host, port=options.port, queue_size=options.queue_size, dtype=options.dtype)
    return 0


def _reward_config(options: argparse.Namespace, keys: tuple[str, ...]) -> Any:
    """The keys of a `reward` section that were given as flags; as many workers as processors if not said."""
    from slipstream.config.loader import load_config
    from slipstream.config.schema import RewardConfig
    from slipstream.workflows.grade import default_workers

    given = {"workers": str(default_workers())}
    given |= {key: value for key in keys if (value := getattr(options, key)) is not None}
    return load_config(RewardConfig, None, [f"--{key}={value}" for key, value in given.items()])


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder, hub name, run directory or checkpoint of one")
    parser.add_argument("--system", metavar="TEXT", help="system message the conversation begins with")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 for greedy answers (default: 1.0)")
    parser.add_argument("--max_response_tokens", type=int, default=512, help="an answer is cut here (default: 512)")
    parser.add_argument("--seed", type=int, help="same lines, same answers (default: other answers each time)")


def _chat(options: argparse.Namespace) -> int:
    from slipstream.workflows.chat import ChatSettings, chat

    settings = ChatSettings(
        temperature=options.temperature,
        max_response_tokens=options.max_response_tokens,
        system=options.system,
        seed=options.seed,
    )
    chat(options.model, settings)
    return 0


def _merge_lora_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="ADAPTER", help="folder with adapter_config.json, as peft writes it")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not hold anything yet")
    parser.add_argument("--base", metavar="MODEL", help="base model (default: the one that the adapter names)")


def _merge_lora(options: argparse.Namespace) -> int:
    from slipstream.workflows.merge_lora import merge_lora

    # Standard output is for the folder alone: DeepSpeed, which comes with peft, has its log there.
    with redirect_stdout(sys.stderr):
        merge_lora(Path(options.adapter), Path(options.out), base=options.base)
    print(options.out)
    return 0


def _import_gguf_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help=".gguf file, folder or installed package that holds one")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not hold anything yet")


def _import_gguf(options: argparse.Namespace) -> int:
    from slipstream.models.gguf import import_gguf

    import_gguf(options.source, Path(options.out))
    print(options.out)
    return 0


VERBS = {
    "report": Verb("write report.html of a run", _report_arguments, _report),
    "doctor": Verb("say what this machine has, what is used, what is missing", _doctor_arguments, _doctor),
    "grade": Verb(
        "grade a file of responses with a verifier",
        _grade_arguments,
        _grade,
        "Grades each row of a file of JSON lines, with response and gold or label, and writes a line of JSON for each "
        "to standard output: reward, answer, milliseconds, failure.",
    ),
    "serve-reward": Verb(
        "serve a reward function or a reward model over HTTP",
        _serve_reward_arguments,
        _serve_reward,
        "Scores the responses that are sent to http://HOST:PORT/score, which runs name in reward.urls. The token that "
        "callers must send is that of the environment variable SLIPSTREAM_REWARD_TOKEN.",
    ),
    "chat": Verb("talk to a model in the terminal", _chat_arguments, _chat),
    "merge-lora": Verb("merge a LoRA adapter into its base model", _merge_lora_arguments, _merge_lora),
    "import-gguf": Verb("convert a GGUF file to a Hugging Face folder", _import_gguf_arguments, _import_gguf),
}
