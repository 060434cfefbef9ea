"""The documents are true: every command and every Python block in them is run, or accounted for, and every name exists.

A command that no rule below knows fails. Cheap commands run as they stand, in a folder that looks like a fresh clone.
Long ones run by the same command line with a tiny policy and a few small overrides behind it, and are marked slow.
`make` targets are looked at with `make -n`. What would install or download something is checked for its form only.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.cli import WORKFLOWS
from slipstream.config.generate import GenerateConfig
from slipstream.config.keys import config_keys, section_paths
from slipstream.config.loader import validate_config
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig
from slipstream.verbs import VERBS as OTHER_VERBS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "slipstream"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"bash", "python", "yaml", "json", "text", "mermaid"}
VERBS = {*WORKFLOWS, "resume", *OTHER_VERBS}
NOT_IN_A_CLONE = {".git", ".venv", "runs", "models", "build", "dist"}
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FIRST_RECIPE = "examples/first_run/recipe.yaml"
LONG_S = 500

pytestmark = pytest.mark.timeout(600)

TINY_ROLLOUT = ["--rollout.engine", "transformers", "--rollout.max_response_tokens", "8"]
TINY_RL = [*TINY_ROLLOUT, "--rollout.groups_per_step", "2", "--rollout.samples_per_prompt", "2", "--steps", "2"]
TINY_RL += ["--checkpoint.every_steps", "1", "--model.dtype", "float32"]
TINY_PIPELINE = ["--sft.steps", "1", "--sft.batch_size", "4", "--sft.data.rows", "200", "--rl.data.rows", "200"]
TINY_PIPELINE += ["--sft.evaluation_data.rows", "8", "--rl.evaluation.data.rows", "8", "--rl.steps", "1"]
TINY_PIPELINE += ["--rl.rollout.engine", "transformers", "--rl.rollout.groups_per_step", "2"]
# What the training block is changed in, so that it is done in seconds. Each must be found in it.
TINY_PYTHON = {
    '"steps": 20': '"steps": 1',
    '"groups_per_step": 8, "samples_per_prompt": 8': '"groups_per_step": 2, "samples_per_prompt": 2',
    '"max_response_tokens": 32': '"max_response_tokens": 8, "engine": "transformers"',
}


# ---------------------------------------------------------------------- what the documents hold, and where it runs


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


@cache
def blocks() -> tuple[Block, ...]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            found.append(Block(document, text.count("\n", 0, match.start(2)) + 1, match[1], match[2]))
    return tuple(found)


def of_language(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language]


@cache
def commands() -> dict[str, str]:
    """Every command of the bash blocks, continuation lines joined, with the place where it is first shown."""
    found: dict[str, str] = {}
    for block in of_language("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                found.setdefault(" ".join(line.split()), block.place)
    return found


def prose(document: Path) -> str:
    """The document without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def inline_code() -> Iterator[tuple[Path, str]]:
    for document in DOCUMENTS:
        for match in re.finditer(r"`([^`\n]+(?:\n[^`\n]+)?)`", prose(document)):
            yield document, " ".join(match[1].split())


def is_long(command: str) -> bool:
    verb = command.removeprefix("slipstream ").split()[0]
    starts_nothing = "--dry-run" in command or "--help" in command or verb in ("report", "grade", "import-gguf")
    return command.startswith("slipstream ") and not starts_nothing


def short_commands() -> list[Any]:
    return [pytest.param(text, id=f"{place} {text}"[:90]) for text, place in commands().items() if not is_long(text)]


def long_commands(verb: str) -> list[str]:
    return [text for text in commands() if is_long(text) and text.split()[1] == verb]


def needs_reward_model(command: str) -> bool:
    return "--reward.model" in command


def clone_into(folder: Path) -> Path:
    """A folder that looks like a fresh clone; what commands write stays in it."""
    for entry in ROOT.iterdir():
        if entry.name not in NOT_IN_A_CLONE and not entry.name.endswith("_cache"):
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return clone_into(tmp_path)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder: two small layers with random weights, a tokenizer of its own, context of 1024 tokens."""
    from slipstream.config.schema import ScratchPolicyConfig
    from slipstream.data.tokenizer import train_tokenizer
    from slipstream.models.scratch import create_policy

    rows = (ROOT / "examples" / "first_run" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    folder = tmp_path_factory.mktemp("documentation") / "policy"
    config = ScratchPolicyConfig(hidden_size=32, heads=1, layers=2, intermediate_size=64, max_tokens=1024)
    create_policy(config, train_tokenizer(rows, 384), seed=0, folder=folder)
    return str(folder)


def run(
    words: list[str], folder: Path, *, expected_code: int = 0, limit_s: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run a program of the environment, as a shell in which it is activated would."""
    if words[0] == "slipstream":
        words = [sys.executable, "-m", "slipstream.cli", *words[1:]]
    elif words[0] == ".venv/bin/python":
        words = [sys.executable, *words[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s)
    assert result.returncode == expected_code, f"{shlex.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result


# ---------------------------------------------------------------------- short commands, one rule each


def shows_help(words: list[str], clone: Path) -> None:
    assert f"slipstream {words[1]}" in run(words, clone).stdout


def is_planned(words: list[str], clone: Path) -> None:
    assert "Nothing was started." in run(words, clone).stdout
    assert not (clone / "runs").exists()


def writes_a_report(words: list[str], clone: Path) -> None:
    from slipstream.config.loader import dump_config, load_config
    from slipstream.observe.run_directory import RunDirectory

    config = load_config(RLConfig, ROOT / FIRST_RECIPE, [])
    RunDirectory.create(clone / words[2], dump_config(config), "rl").close()
    assert run(words, clone).stdout.strip().endswith("report.html")
    assert (clone / words[2] / "report.html").is_file()


def grades_every_row(words: list[str], clone: Path) -> None:
    """The examples are there to show every outcome: right, wrong, and no reward with the reason."""
    rewards = [json.loads(line)["reward"] for line in run(words, clone).stdout.splitlines()]
    assert len(rewards) == len((ROOT / words[2]).read_text().splitlines())
    assert set(rewards) == {1.0, 0.0, None}


def imports_a_model(words: list[str], clone: Path) -> None:
    """The package is not among ours: without it the command says how to get it."""
    if importlib.util.find_spec(words[2].replace("-", "_")) is not None:
        run(words, clone)
        assert (clone / words[3] / "config.json").is_file()
        return
    error = run(words, clone, expected_code=2).stderr
    assert f"pip install --no-deps {words[2]}" in error and "Traceback" not in error


def is_a_target_of_make(words: list[str], clone: Path) -> None:
    run(["make", "-n", *words[1:]], clone)


def names_requirements(words: list[str], clone: Path) -> None:
    from packaging.requirements import Requirement

    packages = [word for word in words[2:] if not word.startswith("-")]
    assert packages and all(Requirement(package).specifier for package in packages)


def sets_what_the_installer_reads(words: list[str], clone: Path) -> None:
    assert words[3].startswith("global.")
    assert f'"{words[3].removeprefix("global.")}"' in (ROOT / "scripts" / "install.py").read_text()


def names_an_image(words: list[str], clone: Path) -> None:
    image = next(word for word in words if word.startswith("slipstream:"))
    dockerfile = (ROOT / f"Dockerfile.{image.partition(':')[2]}").read_text()
    assert image in dockerfile and words[-1] in VERBS


def activates_what_make_install_builds(words: list[str], clone: Path) -> None:
    assert words[1] == ".venv/bin/activate"


def collects_tests(words: list[str], clone: Path) -> None:
    assert "::" in run([*words, "--collect-only", "-q"], clone).stdout


def leaves_the_configuration_document_as_it_is(words: list[str], clone: Path) -> None:
    """Not run: it would write into the repository. What it would write is there already."""
    script = documenting_script()
    assert Path(words[1]).name == Path(str(script.__file__)).name
    document = script.DOCUMENT.read_text(encoding="utf-8")
    assert script.updated(document) == document, f"run `{shlex.join(words)}`"


def is_understood_by_the_benchmark(words: list[str], clone: Path) -> None:
    """Not run: tests/benchmarks runs it, in a small version."""
    load_program(ROOT / words[1]).parse_arguments(words[2:])


RULES: list[tuple[str, Callable[[list[str], Path], None]]] = [
    (r"slipstream [a-z-]+ --help", shows_help),
    (r"slipstream (rl|sft|reward-model|preference|evaluate|generate|pipeline) .*--dry-run.*", is_planned),
    (r"slipstream report \S+", writes_a_report),
    (r"slipstream grade \S+.*", grades_every_row),
    (r"slipstream import-gguf \S+ \S+", imports_a_model),
    (r"make [a-z-]+( [A-Z]+=\S+)*", is_a_target_of_make),
    (r"pip install .+", names_requirements),
    (r"pip config set \S+ \S+", sets_what_the_installer_reads),
    (r"docker run .+", names_an_image),
    (r"source \S+", activates_what_make_install_builds),
    (r"\.venv/bin/python -m pytest .*", collects_tests),
    (r"python benchmarks/\S+\.py .*", is_understood_by_the_benchmark),
    (r"\.venv/bin/python scripts/document_configuration\.py", leaves_the_configuration_document_as_it_is),
]


def documenting_script() -> ModuleType:
    return load_program(ROOT / "scripts" / "document_configuration.py")


def load_program(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module  # dataclasses look their module up there
    sys.path.insert(0, str(path.parent))  # as where it is run: what it imports lies beside it
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@pytest.mark.parametrize("command", short_commands())
def test_a_command_does_what_the_document_says(command: str, clone: Path) -> None:
    rules = [rule for pattern, rule in RULES if re.fullmatch(pattern, command)]
    assert rules, f"no rule knows the command {command!r} of {commands()[command]}"
    rules[0](shlex.split(command), clone)


def test_the_documents_show_what_a_user_needs() -> None:
    """Were the commands not found any more, all tests above would pass."""
    shown = set(commands())
    assert {"make demo", "make test", "make install", "slipstream doctor"} <= shown
    assert {text.split()[1] for text in shown if text.startswith("slipstream ")} == VERBS
    assert len(of_language("python")) >= 5 and len(of_language("yaml")) >= 4


# ---------------------------------------------------------------------- long commands, reduced


@pytest.fixture(scope="module")
def first_run(policy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which the README's first training command has been run, in two small steps."""
    folder = clone_into(tmp_path_factory.mktemp("first"))
    command = f"slipstream rl {FIRST_RECIPE}"
    assert command in commands()
    run([*shlex.split(command), "--model.path", policy, *TINY_RL], folder, limit_s=LONG_S)
    return folder


def test_long_commands_are_all_covered() -> None:
    verbs = ("rl", "sft", "reward-model", "preference", "evaluate", "generate", "pipeline", "resume")
    verbs += ("doctor", "serve-reward", "chat", "merge-lora")
    assert [text for text in commands() if is_long(text) and text.split()[1] not in verbs] == []


@pytest.mark.slow
def test_the_first_run_leaves_what_the_readme_lists(first_run: Path) -> None:
    rows = re.findall(r"^\| `([\w./]+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 10
    directory = first_run / "runs" / "first"
    assert [name for name in rows if not (directory / name).exists()] == []
    listed = {row.rstrip("/") for row in rows} | {".lock"}
    assert [path.name for path in directory.iterdir() if path.name not in listed] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [text for text in long_commands("rl") if not needs_reward_model(text)])
def test_variants_of_a_training_command_are_accepted(command: str, clone: Path, policy: str) -> None:
    """One of them is run for real; the others differ in overrides, which a dry run reads and checks."""
    assert FIRST_RECIPE in command, "a command with another recipe needs a test of its own"
    is_planned([*shlex.split(command), "--model.path", policy, "--dry-run"], clone)


@pytest.mark.slow
@pytest.mark.parametrize("command", long_commands("sft"))
def test_a_supervised_run(command: str, clone: Path, policy: str) -> None:
    words = shlex.split(command)
    run([*words, "--model.path", policy, "--steps", "1"], clone, limit_s=LONG_S)
    assert (clone / words[words.index("--output_dir") + 1] / "export" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("of_steps", [False, True])
def test_a_reward_model_and_a_policy_that_learns_from_it(clone: Path, policy: str, of_steps: bool) -> None:
    [training] = [text for text in long_commands("reward-model") if ("process_rewards" in text) == of_steps]
    run([*shlex.split(training), "--model.path", policy, "--steps", "2"], clone, limit_s=LONG_S)
    rl_commands = [text for text in long_commands("rl") if needs_reward_model(text)]
    [command] = [text for text in rl_commands if ("--reward.step_aggregation" in text) == of_steps]
    tiny = [*TINY_RL, "--model.path", policy, "--evaluation.data.rows", "2", "--json"]
    result = run([*shlex.split(command), *tiny], clone, limit_s=LONG_S)
    directory = clone / json.loads(result.stdout.splitlines()[-1])["run_dir"]
    assert "reward_part/model" in (directory / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_preference_training(clone: Path, policy: str) -> None:
    """One command is run for real; the others differ in overrides, which a dry run reads and checks."""
    first, *variants = long_commands("preference")
    assert len(variants) == 2
    for command in variants:
        is_planned([*shlex.split(command), "--model.path", policy, "--dry-run"], clone)
    result = run([*shlex.split(first), "--model.path", policy, "--steps", "2", "--json"], clone, limit_s=LONG_S)
    assert {"accuracy", "reward_margin", "export"} <= json.loads(result.stdout.splitlines()[-1]).keys()


@pytest.mark.slow
@pytest.mark.parametrize("command", long_commands("evaluate"))
def test_an_evaluation_of_what_was_trained(command: str, first_run: Path) -> None:
    result = run([*shlex.split(command), *TINY_ROLLOUT, "--json"], first_run, limit_s=LONG_S)
    assert {"accuracy", "greedy_accuracy"} <= json.loads(result.stdout.splitlines()[-1]).keys()


@pytest.mark.slow
@pytest.mark.parametrize("command", long_commands("generate"))
def test_answers_in_bulk_of_what_was_trained(command: str, first_run: Path) -> None:
    tiny = [*TINY_ROLLOUT, "--rollout.samples_per_prompt", "2", "--data.rows", "4", "--json"]
    result = run([*shlex.split(command), *tiny], first_run, limit_s=LONG_S)
    directory = first_run / json.loads(result.stdout.splitlines()[-1])["run_dir"]
    shown = re.findall(r"^\| `(\w+\.jsonl?)` \|", (ROOT / "docs" / "generate.md").read_text(), re.MULTILINE)
    assert len(shown) == 4 and [name for name in shown if not (directory / name).is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", long_commands("chat"))
def test_a_word_with_what_was_trained(command: str, first_run: Path) -> None:
    words = [sys.executable, "-m", "slipstream.cli", *shlex.split(command)[1:], "--max_response_tokens", "4"]
    result = subprocess.run(words, cwd=first_run, input="Hello\n", capture_output=True, text=True, timeout=LONG_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", long_commands("serve-reward"))
def test_a_reward_that_is_served(command: str, clone: Path, policy: str) -> None:
    """Says where it is, and ends when it is told to."""
    words = shlex.split(command)
    if "--model" in words:
        put_reward_model(policy, clone / words[words.index("--model") + 1])
    words[words.index("--port") + 1] = "0"
    words = [sys.executable, "-m", "slipstream.cli", *words[1:]]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(words, cwd=clone, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving at http://127.0.0.1:")
        process.terminate()
        assert process.wait(timeout=30) == 0


def put_reward_model(policy: str, folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", long_commands("merge-lora"))
def test_an_adapter_is_merged(command: str, clone: Path, policy: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    words = shlex.split(command)
    model = AutoModelForCausalLM.from_pretrained(policy)
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(clone / words[2])
    assert run(words, clone).stdout == f"{words[3]}\n"
    assert (clone / words[3] / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("command", long_commands("resume"))
def test_resuming_an_interrupted_run(command: str, first_run: Path) -> None:
    words = shlex.split(command)
    directory = first_run / words[2]
    before = (directory / "metrics.jsonl").read_text().splitlines()
    # As a run that was killed after its first checkpoint.
    (directory / "summary.json").unlink()
    newest = max((directory / "checkpoints").glob("step-*"))
    newest.rename(first_run / newest.name)
    run(words, first_run, limit_s=LONG_S)
    assert json.loads((directory / "summary.json").read_text())["steps"] == 2
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == len(before)


@pytest.mark.parametrize("command", long_commands("pipeline"))
def test_a_pipeline_is_planned(command: str, clone: Path) -> None:
    """tests/workflows/test_rlhf_pipeline.py runs this recipe whole; a command with another needs a test of its own."""
    assert command == "slipstream pipeline recipes/rlhf_pipeline.yaml"
    is_planned([*shlex.split(command), "--dry-run"], clone)


@pytest.mark.slow
def test_the_doctor(clone: Path) -> None:
    result = run(["slipstream", "doctor", "--json"], clone, limit_s=LONG_S)
    assert json.loads(result.stdout.splitlines()[-1])["usable"] is True


@pytest.mark.slow
def test_the_demo_ends_with_the_json_that_the_readme_promises(clone: Path) -> None:
    """The very command line of `make demo`, made small."""
    planned = run(["make", "-n", "demo"], clone).stdout.splitlines()
    [line] = [line for line in planned if "slipstream pipeline" in line]
    program = f"{shlex.quote(sys.executable)} -m slipstream.cli pipeline"
    small = re.sub(r"\S*slipstream pipeline", program, line.strip().lstrip("@")) + " " + shlex.join(TINY_PIPELINE)
    result = run(["sh", "-c", small], clone, limit_s=LONG_S)
    summary = json.loads(result.stdout.splitlines()[-1])
    shown = prose(ROOT / "README.md").partition("one JSON object")[2].partition("## Install")[0]
    promised = set(re.findall(r"`(\w+)`", shown))
    assert {"accuracy_before", "accuracy_after", "seconds", "steps", "run_dir"} <= promised <= summary.keys()
    assert (clone / summary["run_dir"] / "report.html").is_file()


# ---------------------------------------------------------------------- blocks of other languages


def python_blocks(*, training: bool) -> list[Any]:
    chosen = [block for block in of_language("python") if ("train_rl(" in block.text) == training]
    return [pytest.param(block, id=block.place) for block in chosen]


@pytest.mark.parametrize("block", python_blocks(training=False))
def test_a_python_block_runs(block: Block, clone: Path) -> None:
    run([sys.executable, "-c", block.text], clone)


@pytest.mark.slow
@pytest.mark.parametrize("block", python_blocks(training=True))
def test_a_training_block_runs(block: Block, clone: Path, policy: str) -> None:
    program = block.text
    for before, after in (TINY_PYTHON | {HUB_MODEL: policy}).items():
        assert program.count(before) == 1, f"{block.place}: {before!r} is not in the block once"
        program = program.replace(before, after)
    assert re.search(r"\d+% before, \d+% after", run([sys.executable, "-c", program], clone, limit_s=LONG_S).stdout)


def test_every_block_says_its_language_and_text_hides_no_commands() -> None:
    assert [block.place for block in blocks() if block.language not in LANGUAGES] == []
    hidden = re.compile(r"^(\$ |slipstream |make |pip |docker |python )", re.MULTILINE)
    assert [block.place for block in of_language("text") if hidden.search(block.text)] == []


def test_a_block_that_names_a_file_is_that_file() -> None:
    named = [block for block in blocks() if re.match(r"# examples/\S+\n", block.text)]
    assert len(named) >= 3
    for block in named:
        path = ROOT / block.text.split()[1]
        assert path.read_text(encoding="utf-8") == block.text, f"{block.place} differs from {path.relative_to(ROOT)}"


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in of_language("yaml")])
def test_a_piece_of_configuration_is_valid(block: Block) -> None:
    from ruamel.yaml import YAML

    needed: dict[str, Any] = {"output_dir": "out", "steps": 1, "model": {"path": "some/model"}}
    needed |= {"data": {"source": "rows.jsonl"}, "reward": {"function": "math"}}
    given = YAML(typ="safe", pure=True).load(block.text)
    validate_config(RLConfig, needed | given)


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in of_language("json")])
def test_a_row_of_data_is_json_and_in_an_example(block: Block) -> None:
    shown = [json.loads(line) for line in block.text.splitlines()]
    examples = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.jsonl"))]
    rows = [json.loads(line) for text in examples for line in text.splitlines()]
    assert all(any(row.items() <= whole.items() for whole in rows) for row in shown)


def test_the_loop_that_is_shown_is_the_loop() -> None:
    program = textwrap.dedent((SOURCE / "workflows" / "rl.py").read_text().partition('"""The method')[2])
    shown = [block.text for block in of_language("text") if block.text.startswith("while run.step")]
    assert len(shown) == 2
    for text in shown:
        assert textwrap.indent(text, "    ") in program


# ---------------------------------------------------------------------- names


def heading_anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_inside_the_repository_lead_somewhere() -> None:
    broken = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or (anchor and anchor not in heading_anchors(file)):
                broken.append(f"{document.name}: {target}")
    assert broken == []


def test_files_and_tests_that_are_named_exist() -> None:
    sections = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()}
    checked, missing = 0, []
    for document, code in inline_code():
        path, _, function = code.partition("::")
        if not re.fullmatch(r"[\w.-]+/(?:[\w./-]+\.\w+)?", path) or path.partition("/")[0] not in sections | tops:
            continue
        checked += 1
        file = next((base / path for base in (ROOT, SOURCE) if (base / path).exists()), None)
        if file is None or (function and f"def {function}(" not in file.read_text(encoding="utf-8")):
            missing.append(f"{document.name}: {code}")
    assert missing == []
    assert checked > 80


def test_keys_that_are_named_exist() -> None:
    kinds = (RLConfig, SFTConfig, RewardModelConfig, PreferenceConfig, EvaluateConfig, GenerateConfig, PipelineConfig)
    keys = {path for kind in kinds for path in (*config_keys(kind), *section_paths(config_keys(kind)))}
    sections = {path.partition(".")[0] for path in keys if "." in path}
    named = re.compile(r"(?:--)?([a-z_]+(?:\.[a-z_]+)+)(?:[:= ].*)?")
    found = [(document.name, match[1]) for document, code in inline_code() if (match := named.fullmatch(code))]
    chosen = [(document, key) for document, key in found if key.partition(".")[0] in sections]
    assert [
        entry for entry in chosen if entry[1] not in keys and not entry[1].endswith((".yaml", ".json", ".svg"))
    ] == []
    assert len(chosen) > 60


def test_commands_in_running_text_are_commands(clone: Path) -> None:
    targets = set()
    for document, code in inline_code():
        words = code.split()
        if words[0] == "slipstream" and len(words) > 1:
            assert words[1] in VERBS, f"{document.name}: {code}"
        if words[0] == "make" and len(words) > 1:
            targets.add(tuple(words[1:]))
    assert len(targets) >= 6
    for target in targets:
        run(["make", "-n", *target], clone)


def test_error_messages_in_troubleshooting_are_ours() -> None:
    """Each heading quotes a message; what stands between its gaps must be in a text of the program."""
    texts = [text for folder in (SOURCE, ROOT / "scripts") for path in folder.rglob("*.py") for text in texts_of(path)]
    document = ROOT / "docs" / "troubleshooting.md"
    headings = "\n".join(re.findall(r"^### (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE))
    fragments = [piece.strip() for quoted in re.findall(r"`([^`]+)`", headings) for piece in quoted.split("…")]
    chosen = [fragment for fragment in fragments if len(fragment) > 2]
    assert [fragment for fragment in chosen if not any(fragment in text for text in texts)] == []
    assert len(chosen) > 25


def texts_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
