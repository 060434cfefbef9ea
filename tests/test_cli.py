"""The command line: what is accepted, what every mistake says, which exit codes there are."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.cli import main, split_overrides
from slipstream.config.generate import GenerateConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig
from slipstream.errors import EngineError

VERBS = [
    "rl",
    "sft",
    "reward-model",
    "preference",
    "evaluate",
    "generate",
    "pipeline",
    "resume",
    "report",
    "doctor",
    "grade",
    "serve-reward",
    "chat",
    "merge-lora",
    "import-gguf",
]
HEAVY = ("torch", "transformers", "vllm", "deepspeed", "ray", "datasets", "pyarrow", "numpy", "matplotlib", "rich")
RL = ["--steps=3", "--output_dir=out", "--model.path=some/model", "--data.source=d.jsonl", "--reward.function=math"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    yield tmp_path


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Put a function in place of one that a verb imports when it runs; returns the arguments it is called with."""

    def put(module_name: str, name: str, result: Any) -> list[Any]:
        calls: list[Any] = []

        def function(*arguments: Any) -> Any:
            calls.extend(arguments)
            if isinstance(result, BaseException):
                raise result
            return result

        module = ModuleType(module_name)
        setattr(module, name, function)
        monkeypatch.setitem(sys.modules, module_name, module)
        return calls

    return put


def python(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rll"], "unknown command 'rll'; did you mean rl?"),
        (["rl"], "`slipstream rl` needs a RECIPE, or keys as --section.key value (see `slipstream rl --help`)"),
        (["rl", "nowhere.yaml"], "no recipe 'nowhere.yaml': no such file"),
        (["rl", "a.yaml", "b.yaml"], "unrecognized arguments: b.yaml (see `slipstream --help`)"),
        (
            ["rl", *RL, "--learning_rate", "1"],
            "learning_rate: unknown key (value 1); did you mean training.learning_rate or critic.learning_rate?",
        ),
        (["rl", *RL, "--steps"], "--steps has no value; expected a whole number of at least 1"),
        (["rl", *RL, "--dry_run"], "unknown option --dry_run; did you mean --dry-run?"),
        (["rl", *RL, "--max_restarts", "3"], "unknown option --max_restarts; did you mean --max-restarts?"),
        (["rl", *RL, "--max-restarts", "-1"], "argument --max-restarts: found -1, expected a whole number, 0 or more"),
        (["rl", *RL, "--jsn"], "unknown option --jsn; did you mean --json?"),
        (["rl", *RL, "--data.source", "./x.jsonl", "--dry-run"], "data.source: no file or folder './x.jsonl'"),
        (["rl", *RL, "--reward.function", "numbr", "--dry-run"], "reward.function 'numbr' is neither"),
        (["rl", *RL, "--model.path", "./nowhere", "--dry-run"], "model.path: no folder './nowhere'"),
        (["resume"], "the following arguments are required: RUN_DIR (see `slipstream resume --help`)"),
        (["report", "a", "b"], "unrecognized arguments: b (see `slipstream --help`)"),
        (["doctor", "--fast"], "unrecognized arguments: --fast (see `slipstream --help`)"),
        (["--frob"], "unrecognized arguments: --frob (see `slipstream --help`)"),
        (["report", "nowhere"], "run directory"),
        (["resume", "nowhere"], "run directory"),
        (["import-gguf", "nowhere.gguf", "out"], "no file, folder or installed package is called 'nowhere.gguf'"),
        (["chat", "./nowhere"], "no folder './nowhere'; expected a model folder, a hub name, a run directory"),
        (["chat", "./nowhere", "--temperature", "-1"], "--temperature: found -1, expected 0 (greedy) to 10"),
        (["merge-lora", "nowhere", "out"], "nowhere is no adapter: it has no adapter_config.json"),
        (["serve-reward"], "nothing to serve: name a function by --function, or a reward model by --model"),
    ],
)
def test_a_mistake_is_an_error_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_several_mistakes_are_an_error_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", *RL, "--steps=0", "--frob=1"]) == 2
    assert [line[:13] for line in capsys.readouterr().err.splitlines()] == ["error: frob: ", "error: steps:"]


def test_overrides_and_flags_may_stand_in_any_order() -> None:
    words = ["--a.b", "-1", "r.yaml", "--json", "--c=d", "--max-restarts", "2", "--e", "f", "--dry-run"]
    rest, overrides = split_overrides(words)
    assert rest == ["r.yaml", "--json", "--max-restarts", "2", "--dry-run"]
    assert overrides == ["--a.b", "-1", "--c=d", "--e", "f"]


@pytest.mark.parametrize(
    ("verb", "function", "kind", "arguments"),
    [
        ("rl", "train_rl", RLConfig, RL),
        ("sft", "train_sft", SFTConfig, [*RL[:4], "--data.response_key=label"]),
        ("reward-model", "train_reward_model", RewardModelConfig, RL[:4]),
        ("preference", "train_preference", PreferenceConfig, RL[:4]),
        ("evaluate", "evaluate", EvaluateConfig, [*RL[1:3], RL[4], "--evaluation.data.source=d.jsonl"]),
        ("generate", "generate", GenerateConfig, RL[1:4]),
    ],
)
def test_a_workflow_gets_its_configuration_and_its_summary_is_the_last_line(
    verb: str,
    function: str,
    kind: type,
    arguments: list[str],
    replace: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = replace(f"slipstream.workflows.{verb.replace('-', '_')}", function, {"steps": 3})
    assert main([verb, *arguments, "--json"]) == 0
    assert type(calls[0]) is kind
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"steps": 3}


def test_a_recipe_is_read_and_overridden(files: Path, replace: Callable[..., list[Any]]) -> None:
    calls = replace("slipstream.workflows.rl", "train_rl", {})
    (files / "r.yaml").write_text("steps: 3\nseed: 1\noutput_dir: o\nmodel: {path: m}\ndata: {source: d}\n")
    assert main(["rl", "--seed", "-0", "r.yaml", "--training.learning_rate", "1e-4"]) == 0
    assert (calls[0].seed, calls[0].steps, calls[0].training.learning_rate) == (0, 3, 1e-4)


def test_resume_and_report_are_given_the_run_directory(
    replace: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = replace("slipstream.workflows.resume", "resume", {"steps": 9})
    assert main(["resume", "runs/x", "--json"]) == 0
    assert calls == ["runs/x", []]
    assert json.loads(capsys.readouterr().out) == {"steps": 9}
    replace("slipstream.observe.report", "write_report", Path("runs/x/report.html"))
    assert main(["report", "runs/x"]) == 0
    assert capsys.readouterr().out == "runs/x/report.html\n"


def test_resume_is_given_what_is_to_be_another(replace: Callable[..., list[Any]]) -> None:
    calls = replace("slipstream.workflows.resume", "resume", {"steps": 9})
    assert main(["resume", "runs/x", "--training.data_parallel", "2", "--training.zero_stage=3"]) == 0
    assert calls == ["runs/x", ["--training.data_parallel", "2", "--training.zero_stage=3"]]


def test_an_engine_that_failed_is_exit_code_1_without_a_traceback(
    replace: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    replace("slipstream.workflows.rl", "train_rl", EngineError("rollout engine 0 died"))
    assert main(["rl", *RL]) == 1
    assert capsys.readouterr().err == "error: rollout engine 0 died\n"


def test_an_interrupt_is_exit_code_130_and_a_short_line(
    replace: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    replace("slipstream.workflows.rl", "train_rl", KeyboardInterrupt())
    assert main(["rl", *RL]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_defect_of_ours_keeps_its_traceback(replace: Callable[..., list[Any]]) -> None:
    replace("slipstream.workflows.rl", "train_rl", ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["rl", *RL])


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'slipstream.cli', '--version'],"
    program += " stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True); p.stdout.close();"
    program += " print(p.wait(), repr(p.stderr.read()))"
    assert python(program).stdout == "141 ''\n"


def test_json_of_a_dry_run_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", *RL, "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["config"]["steps"] == 3
    assert "Nothing was started." in captured.err


def test_version_and_help_without_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("slipstream ")
    assert main([]) == 2
    text = capsys.readouterr().out
    assert [verb for verb in VERBS if verb not in text] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"usage: slipstream {verb}" in capsys.readouterr().out


def test_the_help_of_a_workflow_shows_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--training.learning_rate 1e-06" in text
    assert "algorithm: The method: a preset" in text


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from slipstream.cli import main\n"
        f"for verb in {VERBS!r}: assert main([verb, '--help']) == 0\n"
        f"sys.stderr.write(repr([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = python(program)
    assert done.stderr == "[]"
    assert done.returncode == 0


def test_with_json_the_progress_of_a_run_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resume(run_dir: str, overrides: list[str]) -> dict[str, Any]:
        print("step 1/2")
        return {"steps": 2}

    monkeypatch.setattr("slipstream.workflows.resume.resume", resume)
    assert main(["resume", "runs/x", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"steps": 2}
    assert "step 1/2" in captured.err and "step 1/2" not in captured.out


def test_a_failure_after_the_start_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resume(run_dir: str, overrides: list[str]) -> dict[str, Any]:
        raise EngineError("learner rank 0 died")

    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "config.yaml").write_text("steps: 1\n")
    monkeypatch.setattr("slipstream.workflows.resume.resume", resume)
    assert main(["resume", str(tmp_path / "a run")]) == 1
    errors = capsys.readouterr().err
    assert f"go on with: slipstream resume '{tmp_path}/a run'" in errors
    assert "error: learner rank 0 died" in errors


def test_what_the_system_refuses_is_an_error_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "x" * 300]) == 1
    assert "File name too long" in capsys.readouterr().err
