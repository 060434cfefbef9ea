import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import RunDirectoryError
from slipstream.observe.environment import describe_environment, redact
from slipstream.observe.run_directory import RunDirectory, differences, parse_config

CONFIG = "seed: 1\noutput_dir: here\nmodel:\n  path: a\n  dtype: auto\ntraining: {betas: [0.9, 0.95]}\n"

HOLD = (
    "import os, sys, time; from slipstream.observe.run_directory import RunDirectory\n"
    "run = RunDirectory.create(sys.argv[1], 'seed: 1', 'rl')\n"
    "{body}\n"
    "print('ready', flush=True); time.sleep(60)\n"
)


def hold(path: Path, body: str = "pass") -> "subprocess.Popen[str]":
    """Another process that has a run in `path` going on."""
    command = [sys.executable, "-c", HOLD.format(body=body), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_new_run_records_its_configuration_and_environment(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "deep" / "run", CONFIG, "rl") as run:
        assert run.config_text == CONFIG
        assert run.workflow == "rl"
        assert not run.finished and run.summary is None
        (start,) = run.environment["starts"]
        assert start["packages"]["pydantic"]
        assert start["python"]["version"] == sys.version.split()[0]
        assert start["command"] == redact(sys.argv)
        assert start["machine"]["memory_bytes"] > 1 << 28


def test_environment_variables_and_secrets_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-in-the-environment")
    arguments = [
        "slipstream",
        "rl",
        "--hub.token",
        "s3cret",
        "--api-key=s3cret",
        "--data.source",
        "http://me:s3cret@h/x",
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, "--data.prompt_key", "question", "--data.max_prompt_tokens", "9"])
    described = json.dumps(describe_environment())
    assert "s3cret" not in described
    for kept in ("--data.prompt_key", "question", "--data.max_prompt_tokens", "http://***@h/x"):
        assert kept in described


def test_the_git_commit_of_the_working_folder_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_environment()["git"] is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *arguments], check=True, timeout=20)
    recorded = describe_environment()["git"]
    assert len(recorded["commit"]) == 40 and recorded["changed_files"] is False
    (tmp_path / "file").write_text("2")
    assert describe_environment()["git"]["changed_files"] is True


def begun(path: Path) -> None:
    """A run that has finished a step."""
    with RunDirectory.create(path, CONFIG, "rl") as run:
        run.metrics_path.write_text('{"step": 1}\n')


def test_a_run_that_failed_before_its_first_step_is_replaced_by_a_mended_one(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG, "rl").close()
    mended = CONFIG.replace("seed: 1", "seed: 2")
    RunDirectory.create(tmp_path / "run", mended, "rl").close()
    assert (tmp_path / "run" / "config.yaml").read_text() == mended


def test_another_configuration_is_refused_and_the_differences_are_named(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    other = CONFIG.replace("seed: 1", "seed: 2").replace("path: a", "path: b").replace("here", "there")
    with pytest.raises(RunDirectoryError) as error:
        RunDirectory.create(tmp_path / "run", other, "rl")
    assert "(model.path: a there, b here; seed: 1 there, 2 here)" in str(error.value)
    assert "choose another output_dir or remove it" in str(error.value)
    assert (tmp_path / "run" / "config.yaml").read_text() == CONFIG


def test_an_unfinished_run_with_the_same_configuration_is_to_be_resumed(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=f"slipstream resume {tmp_path}/run"):
        RunDirectory.create(tmp_path / "run", "# same\n" + CONFIG, "rl")


def test_a_finished_run_is_neither_started_nor_resumed(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG, "rl") as run:
        run.write_summary({"steps": 3})
        assert run.finished and run.summary == {"steps": 3}
    with pytest.raises(RunDirectoryError, match="is finished already"):
        RunDirectory.create(tmp_path / "run", CONFIG, "rl")
    with pytest.raises(RunDirectoryError, match="nothing to resume"):
        RunDirectory.resume(tmp_path / "run")


def test_resume_notes_the_new_start_and_holds_the_lock(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG, "rl").close()
    with RunDirectory.resume(tmp_path / "run") as run:
        assert len(run.environment["starts"]) == 2
        assert run.workflow == "rl"
        with pytest.raises(RunDirectoryError, match="is in use by process"):
            RunDirectory.resume(tmp_path / "run")
    RunDirectory.resume(tmp_path / "run").close()


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirectoryError, match=r"neither empty nor a run directory \(it holds thesis\.tex\)"):
        RunDirectory.create(tmp_path, CONFIG, "rl")
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.create(tmp_path / "thesis.tex", CONFIG, "rl")


def test_a_start_killed_before_it_wrote_its_configuration_is_no_obstacle(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG, "rl").close()
    (tmp_path / "run" / "config.yaml").rename(tmp_path / "run" / ".config.yaml.12.partial")
    RunDirectory.create(tmp_path / "run", CONFIG, "rl").close()


def test_only_run_directories_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="does not exist"):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError, match=r"has no config\.yaml"):
        RunDirectory.open(tmp_path)


def test_two_processes_cannot_run_in_one_directory_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = hold(path)
    try:
        for use in (lambda: RunDirectory.create(path, "seed: 1", "rl"), lambda: RunDirectory.resume(path)):
            with pytest.raises(RunDirectoryError, match=f"is in use by process {process.pid}"):
                use()
        assert RunDirectory.open(path).in_use
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    assert not RunDirectory.open(path).in_use
    RunDirectory.resume(path).close()


def test_a_forked_child_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "run"
    body = "child = os.fork()\nif child == 0: time.sleep(60)\nprint(child, file=open(sys.argv[1] + '.child', 'w'))"
    process = hold(path, body)
    child = int((tmp_path / "run.child").read_text())
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        os.kill(child, 0)  # The child is alive.
        RunDirectory.resume(path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_differences_are_dotted_sorted_have_both_values_and_do_not_contain_the_place() -> None:
    first = {"a": 1, "b": {"c": [1], "d": {}}, "output_dir": "x"}
    second = {"a": 1, "b": {"c": [2]}, "e": None, "output_dir": "y"}
    expected = ["b.c: [1] there, [2] here", "b.d: {} there, unset here", "e: unset there, None here"]
    assert differences(first, second) == expected
    assert differences(first, first) == []


@pytest.mark.parametrize(("text", "said"), [("a: [", "not valid YAML"), ("- 1", "found list"), ("", "found NoneType")])
def test_a_configuration_that_cannot_be_read_is_a_clear_error(text: str, said: str) -> None:
    with pytest.raises(RunDirectoryError, match=said):
        parse_config(text)
