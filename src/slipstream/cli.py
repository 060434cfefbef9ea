"""`slipstream VERB`: reads the command line, calls one function, turns errors into one line and an exit code.

What a verb needs is imported when it runs, so that every `--help` answers at once. Exit codes: 0 done, 1 the run
failed, 2 the input is wrong, 130 interrupted. With `--json` the last line on standard output is one JSON object and
what is meant for people goes to standard error.
"""

import argparse
import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.verbs import VERBS

if TYPE_CHECKING:
    from slipstream.config.base import Section

INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 + SIGPIPE: what a shell reports of a program that writes to a closed pipe

WORKFLOWS = {
    "rl": "improve a policy by reinforcement learning from a reward",
    "sft": "fine-tune a model on responses",
    "reward-model": "train a model that scores answers, on pairs of a better and a worse one",
    "preference": "train a policy on better and worse answers: DPO, IPO, SimPO, ORPO or KTO",
    "evaluate": "measure a model's accuracy on held-out prompts, sampled and greedy",
    "generate": "answer the prompts of a data set, and select the best answers",
    "pipeline": "make a small policy, teach it by SFT, improve it by RL",
}
WORKFLOW_FLAGS = ("--dry-run", "--json", "--help")
MAX_RESTARTS = "--max-restarts"


def main(argv: Sequence[str] | None = None, *, fault_code: int = SlipstreamError.exit_code) -> int:
    """Run one verb and return the exit code; `fault_code` where a fault ended it, and it may succeed again."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except SlipstreamError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return fault_code if error.is_fault else error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return _end_quietly()
        # A path too long, a folder that cannot be made, a disk that fails: the system's own words say which.
        print(f"error: {error}", file=sys.stderr)
        return SlipstreamError.exit_code


def _end_quietly() -> int:
    """The reader is gone. The interpreter flushes standard output once more at exit: let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


class _Parser(argparse.ArgumentParser):
    """Errors become ConfigError; the help of a workflow ends with its configuration keys."""

    workflow: str | None = None

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def format_help(self) -> str:
        text = super().format_help()
        if self.workflow is None:
            return text
        from slipstream.config.help_text import describe_keys

        width = min(shutil.get_terminal_size((120, 24)).columns, 140)
        return f"{text}\n{describe_keys(_config_class(self.workflow), width=width)}\n"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="slipstream", description="Reinforcement learning of language models.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    for name, description in WORKFLOWS.items():
        verb = verbs.add_parser(
            name,
            help=description,
            description=f"{description[0].upper()}{description[1:]}.",
            usage=f"slipstream {name} [RECIPE] [--dry-run] [--json] [{MAX_RESTARTS} N] [--section.key VALUE ...]",
            allow_abbrev=False,
        )
        verb.workflow = name
        verb.add_argument("recipe", metavar="RECIPE", nargs="?", help="YAML file, or name of a recipe of Slipstream")
        verb.add_argument("--dry-run", action="store_true", help="show what would happen and start nothing")
        verb.add_argument("--json", action="store_true", help="end with the summary as one line of JSON")
        _add_max_restarts(verb)
    resume = verbs.add_parser(
        "resume",
        help="go on with an interrupted run",
        usage=f"slipstream resume RUN_DIR [--json] [{MAX_RESTARTS} N] [--training.data_parallel N ...]",
        epilog="A run goes on with the configuration it was started with, but for the layout of its ranks, which may "
        "be changed: see docs/memory.md.",
        allow_abbrev=False,
    )
    resume.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    resume.add_argument("--json", action="store_true", help="end with the summary as one line of JSON")
    _add_max_restarts(resume)
    for name, other in VERBS.items():
        parser_of_verb = verbs.add_parser(name, help=other.help, description=other.description, allow_abbrev=False)
        other.add_arguments(parser_of_verb)
    return parser


def _add_max_restarts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        MAX_RESTARTS,
        metavar="N",
        type=_count,
        default=0,
        help="start the run again, from its last checkpoint, up to N times where a fault ends it (default: 0)",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text}, expected a whole number, 0 or more")
    return int(text)


def _run(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help()
        return ConfigError.exit_code
    _check_verb(arguments[0])
    overrides: list[str] = []
    if arguments[0] in (*WORKFLOWS, "resume"):
        rest, overrides = split_overrides(arguments[1:])
        arguments = [arguments[0], *rest]
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse ends this way after --help
        return int(stop.code or 0)
    if options.version:
        print(f"slipstream {_version()}")
        return 0
    # A module beside the recipe can hold the reward function; last, so that it never hides an installed package.
    sys.path.append(os.getcwd())
    if options.verb in WORKFLOWS:
        return _run_workflow(options, overrides)
    if options.verb == "resume":
        return _resume(options, overrides)
    return VERBS[options.verb].run(options)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the arguments of a workflow into argparse's own and the overrides `--key value` or `--key=value`."""
    rest: list[str] = []
    overrides: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument in (*WORKFLOW_FLAGS, "-h") or not argument.startswith("--"):
            rest.append(argument)
            continue
        name = argument.partition("=")[0]
        if name == MAX_RESTARTS:
            rest += [argument, *waiting[: "=" not in argument]]
            del waiting[: "=" not in argument]
            continue
        if name.replace("_", "-") == MAX_RESTARTS:
            raise ConfigError(f"unknown option {name}; did you mean {MAX_RESTARTS}?")
        overrides.append(argument)
        if "=" in argument:
            continue
        if waiting and not waiting[0].startswith("--"):
            overrides.append(waiting.pop(0))
            continue
        near = difflib.get_close_matches(argument.replace("_", "-"), WORKFLOW_FLAGS, n=1, cutoff=0.8)
        if near:
            raise ConfigError(f"unknown option {argument}; did you mean {near[0]}?")
    return rest, overrides


def _check_verb(word: str) -> None:
    verbs = (*WORKFLOWS, "resume", *VERBS)
    if word.startswith("-") or word in verbs:
        return
    near = difflib.get_close_matches(word, verbs, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown command {word!r}{hint} (commands: {', '.join(verbs)})")


def _run_workflow(options: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.config.loader import load_config, resolve_recipe

    recipe = None if options.recipe is None else resolve_recipe(options.recipe)
    if recipe is None and not overrides:
        raise ConfigError(
            f"`slipstream {options.verb}` needs a RECIPE, or keys as --section.key value "
            f"(see `slipstream {options.verb} --help`)"
        )
    config: Any = load_config(_config_class(options.verb), recipe, overrides)
    if options.dry_run:
        return _dry_run(config, as_json=options.json)
    can_resume = options.verb != "evaluate"
    if options.max_restarts:
        arguments = [options.verb, *([] if options.recipe is None else [options.recipe]), *["--json"] * options.json]
        return _run_attempts([*arguments, *overrides], options, Path(config.output_dir), can_resume=can_resume)
    with _progress_on(options.json), _saying_how_to_go_on(Path(config.output_dir) if can_resume else None):
        summary = _start(options.verb, config)
    _finish(summary, as_json=options.json)
    return 0


def _run_attempts(arguments: list[str], options: argparse.Namespace, run_dir: Path, *, can_resume: bool) -> int:
    from slipstream.attempts import Attempts

    return Attempts(
        arguments,
        run_dir=run_dir,
        can_resume=can_resume,
        as_json=options.json,
        max_restarts=options.max_restarts,
    ).run()


@contextmanager
def _progress_on(json_wanted: bool) -> Iterator[None]:
    """With --json standard output is for the JSON object alone; what is meant for people goes to standard error."""
    if not json_wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def _saying_how_to_go_on(run_dir: Path | None) -> Iterator[None]:
    """After an interruption or a failure, name the command that goes on; not where the run had not begun."""
    try:
        yield
    except (KeyboardInterrupt, SlipstreamError) as stop:
        is_wrong_input = isinstance(stop, SlipstreamError) and stop.exit_code == ConfigError.exit_code
        if run_dir is not None and not is_wrong_input and (run_dir / "config.yaml").exists():
            print(f"go on with: slipstream resume {shlex.quote(str(run_dir))}", file=sys.stderr)
        raise


def _start(verb: str, config: Any) -> dict[str, Any]:
    """Run a workflow to its end; its summary."""
    if verb == "rl":
        from slipstream.workflows.rl import train_rl

        return train_rl(config)
    if verb == "sft":
        from slipstream.workflows.sft import train_sft

        return train_sft(config)
    if verb == "reward-model":
        from slipstream.workflows.reward_model import train_reward_model

        return train_reward_model(config)
    if verb == "preference":
        from slipstream.workflows.preference import train_preference

        return train_preference(config)
    if verb == "evaluate":
        from slipstream.workflows.evaluate import evaluate

        return evaluate(config)
    if verb == "generate":
        from slipstream.workflows.generate import generate

        return generate(config)
    from slipstream.workflows.pipeline import run_pipeline

    return run_pipeline(config)


def _dry_run(config: Any, *, as_json: bool) -> int:
    from rich.console import Console

    from slipstream.workflows.dry_run import dry_run, print_dry_run

    plan = dry_run(config)
    print_dry_run(plan, Console(stderr=as_json))
    _finish(plan.as_json(), as_json=as_json)
    return 0


def _resume(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.max_restarts:
        arguments = ["resume", options.run_dir, *["--json"] * options.json, *overrides]
        return _run_attempts(arguments, options, Path(options.run_dir), can_resume=True)
    from slipstream.workflows.resume import resume

    with _progress_on(options.json), _saying_how_to_go_on(Path(options.run_dir)):
        summary = resume(options.run_dir, overrides)
    _finish(summary, as_json=options.json)
    return 0


def _finish(summary: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        from slipstream.observe.files import to_json

        print(to_json(summary))


def _config_class(verb: str) -> "type[Section]":
    from slipstream.config.generate import GenerateConfig
    from slipstream.config.pipeline import PipelineConfig
    from slipstream.config.preference import PreferenceConfig
    from slipstream.config.reward_model import RewardModelConfig
    from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig

    classes: dict[str, type[Section]] = {
        "rl": RLConfig,
        "sft": SFTConfig,
        "reward-model": RewardModelConfig,
        "preference": PreferenceConfig,
        "evaluate": EvaluateConfig,
        "generate": GenerateConfig,
        "pipeline": PipelineConfig,
    }
    return classes[verb]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("slipstream")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
