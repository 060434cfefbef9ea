"""Bad input through the command line: one clear line, a non-zero exit code, no traceback, and nothing lost."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WRONG_INPUT, FAILED = 2, 1
MODEL_KIB = 384  # a little less than the tiny policy


def error_of(process: Any, *, code: int) -> str:
    """The one line that the process complained with."""
    assert process.finish() == code, f"{process.stdout}\n{process.stderr}"
    assert "Traceback" not in process.stderr
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, process.stderr
    assert process.stderr.splitlines()[-1] == errors[0]
    return errors[0]


# ---------------------------------------------------------------- data and model: refused before anything starts


def test_a_missing_file_is_named(bench: Any) -> None:
    process = bench.start("rl", "run", bench.rl_settings(data__source="no_such.jsonl"))
    assert "no_such.jsonl" in error_of(process, code=WRONG_INPUT)
    assert not (bench.folder / "run").exists()


def test_a_missing_column_is_named_with_the_columns_found(bench: Any) -> None:
    process = bench.start("rl", "run", bench.rl_settings(data__prompt_key="question"))
    message = error_of(process, code=WRONG_INPUT)
    assert all(word in message for word in ("data.prompt_key", "question", "prompt", "label", "response"))
    assert not (bench.folder / "run").exists()


def test_an_empty_dataset_is_refused(bench: Any) -> None:
    (bench.folder / "empty.jsonl").write_text("")
    process = bench.start("sft", "run", bench.sft_settings(data__source="empty.jsonl"))
    assert "empty.jsonl" in error_of(process, code=WRONG_INPUT)


def test_a_dataset_whose_prompts_are_all_too_long_is_refused(bench: Any) -> None:
    process = bench.start("rl", "run", bench.rl_settings(data__max_prompt_tokens=3))
    message = error_of(process, code=WRONG_INPUT)
    assert "max_prompt_tokens" in message and "100" in message
    assert not (bench.folder / "run").exists()


def test_a_model_folder_without_tokenizer_is_refused(bench: Any) -> None:
    model = shutil.copytree(bench.policy, bench.folder / "model")
    for path in model.glob("tokenizer*"):
        path.unlink()
    process = bench.start("rl", "run", bench.rl_settings(model__path=str(model)))
    assert "tokenizer" in error_of(process, code=WRONG_INPUT)


def test_a_model_folder_without_chat_template_is_refused(bench: Any) -> None:
    model = shutil.copytree(bench.policy, bench.folder / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    process = bench.start("rl", "run", bench.rl_settings(model__path=str(model)))
    message = error_of(process, code=WRONG_INPUT)
    assert "chat template" in message and "apply_chat_template" in message


# ---------------------------------------------------------------- the run directory


def started_before(bench: Any, run: str, **changes: Any) -> Path:
    """A run directory as a run leaves it that was interrupted before its first checkpoint."""
    from slipstream.config.loader import dump_config, load_config
    from slipstream.config.schema import RLConfig
    from slipstream.observe.run_directory import RunDirectory

    settings = bench.rl_settings(output_dir=run, **changes)
    config = load_config(RLConfig, None, [f"--{key}={value}" for key, value in settings.items()])
    with RunDirectory.create(bench.folder / run, dump_config(config), "rl") as directory:
        (directory.path / "metrics.jsonl").write_text('{"step": 1, "policy_version": 1}\n')
        return directory.path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_output_folder_with_another_configuration_is_left_alone(bench: Any) -> None:
    run = started_before(bench, "run", training__learning_rate=0.5)
    before = content(run)
    message = error_of(bench.start("rl", "run", bench.rl_settings()), code=WRONG_INPUT)
    assert "training.learning_rate" in message and "output_dir" in message
    assert content(run) == before


def test_an_output_folder_with_an_unfinished_run_says_how_to_go_on(bench: Any) -> None:
    run = started_before(bench, "run")
    before = content(run)
    assert "slipstream resume" in error_of(bench.start("rl", "run", bench.rl_settings()), code=WRONG_INPUT)
    assert content(run) == before


def test_an_output_folder_in_use_by_another_process_is_left_alone(bench: Any) -> None:
    import os

    from slipstream.observe.lock import DirectoryLock

    run = started_before(bench, "run")
    lock = DirectoryLock(run)
    before = content(run)
    message = error_of(bench.command("resume", "run"), code=WRONG_INPUT)
    assert f"in use by process {os.getpid()}" in message
    assert content(run) == before
    lock.release()


def test_a_folder_that_is_no_run_cannot_be_resumed(bench: Any) -> None:
    assert "not a run directory" in error_of(bench.command("resume", "."), code=WRONG_INPUT)


def test_a_run_that_came_to_its_end_is_complete_and_gets_the_report_it_was_killed_before(bench: Any) -> None:
    run = started_before(bench, "run")
    (run / "summary.json").write_text('{"steps": 6}')
    process = bench.command("resume", "run", "--json")
    assert process.finish() == 0, process.stderr
    assert json.loads(process.stdout) == {"steps": 6}
    assert f"the run in {run} is complete" in process.stderr and len(process.stderr.splitlines()) == 1
    assert "Reinforcement learning" in (run / "report.html").read_text()
    before = content(run)
    assert bench.command("resume", "run").finish() == 0
    assert content(run) == before, "nothing is left to do the second time"


# ---------------------------------------------------------------- rewards


def balance(run: Path) -> Any:
    from slipstream.observe.ledger import read_balance

    return read_balance(run / "ledger.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_reward_that_fails_on_some_prompts_costs_those_groups_and_nothing_else(
    bench: Any, write_rows: Callable[..., Path]
) -> None:
    firsts = [1, 5, 6, 2, 7, 8, 3, 9, 5, 4, 6, 7]
    rows = write_rows(
        bench.folder / "rows.jsonl",
        [{"prompt": f"What is {first} + {row}?", "label": str(first + row)} for row, first in enumerate(firsts)],
    )
    settings = bench.rl_settings(
        steps=2,
        data__source=str(rows),
        data__shuffle=False,
        reward__function="rewards.py:misbehave",
        reward__on_failure="drop_group",
        reward__timeout_s=1,
    )
    process = bench.run("rl", "run", settings)
    assert process.survivors(limit_s=10) == [], "the call that never returned was killed"

    account = balance(bench.folder / "run")
    assert (account.issued, account.trained, account.pending) == (12, 8, 0)
    assert sorted(account.failed.values()) == [1, 1, 1, 1]
    reasons = " | ".join(account.failed)
    assert "KeyError" in reasons and "no such answer" in reasons
    assert "nan" in reasons.lower()
    assert "returned 2 values" in reasons
    assert "timed out after 1 s" in reasons
    # Nobody's reward became 0 in silence: what was trained on is the eight groups of the other prompts.
    trained = {json.loads(line)["prompt"].split()[2] for line in bench.rollouts("run")}
    assert trained and trained.isdisjoint("1234")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_reward_that_always_fails_ends_the_run_and_is_quoted(bench: Any) -> None:
    settings = bench.rl_settings(reward__function="rewards.py:always_raise", reward__on_failure="drop_group")
    message = error_of(bench.start("rl", "run", settings), code=FAILED)
    assert "the grader is down" in message and "reward.function" in message
    account = balance(bench.folder / "run")
    assert account.trained == 0 and account.issued == account.accounted


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of so many KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={request.param}k"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"no permission to mount a small file system: {mount.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("small_disk", [4096], ids=["for two checkpoints and no third"], indirect=True)
def test_a_full_disk_while_saving_loses_nothing(bench: Any, small_disk: Path) -> None:
    run = str(small_disk / "run")
    process = bench.start("rl", run, bench.rl_settings(steps=5, checkpoint__every_steps=1, checkpoint__keep=4))
    message = error_of(process, code=FAILED)
    assert "no space" in message.lower() and "resume" in message
    assert process.survivors(limit_s=10) == []
    kept = sorted(path.name for path in (small_disk / "run/checkpoints").iterdir())
    assert kept == [f"step-{step:06d}" for step in range(1, len(kept) + 1)] and 1 <= len(kept) < 4

    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = bench.resume(run)
    assert f"step-{len(kept):06d}" in resumed.stderr
    assert [line["step"] for line in bench.metrics(run)] == ["1", "2", "3", "4", "5"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("small_disk", [MODEL_KIB], ids=["for an adapter and no model"], indirect=True)
def test_a_full_disk_while_exporting_loses_nothing(bench: Any, small_disk: Path) -> None:
    """Checkpoints hold the adapter alone; the export is the merged model."""
    run = small_disk / "run"
    settings = bench.sft_settings(steps=2, checkpoint__every_steps=1) | {"model.lora": {"rank": 1}}
    process = bench.start("sft", str(run), settings)
    message = error_of(process, code=FAILED)
    assert "No space left on device" in message and str(run) in message and "resume" in message
    assert process.survivors(limit_s=10) == []
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert not any("export" in path.name for path in run.iterdir()), "half a model is none"
    metrics = bench.metrics(str(run))

    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = bench.resume(str(run))
    assert "step-000002" in resumed.stderr
    assert bench.metrics(str(run)) == metrics and len(metrics) == 2
    assert (run / "export/model.safetensors").stat().st_size > MODEL_KIB << 10
    assert (run / "summary.json").exists() and (run / "report.html").exists()
