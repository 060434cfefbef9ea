import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.errors import TrainingError
from slipstream.observe.checkpoints import CheckpointStore, checkpoint_step, find_damage


def fill(text: str = "weights") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "learner").mkdir()
        (folder / "learner" / "rank-0.bin").write_text(text)
        (folder / "controller.json").write_text("{}")

    return write


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_checkpoint_holds_what_was_written_and_a_manifest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    folder = store.write(10, fill())
    assert folder == tmp_path / "step-000010"
    assert (folder / "learner" / "rank-0.bin").read_text() == "weights"
    assert find_damage(folder) is None
    assert store.latest() == folder
    assert checkpoint_step(folder) == 10
    assert store.warnings == []


def test_without_checkpoints_there_is_no_latest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "checkpoints", keep=1).latest() is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (999_999, 1_000_000):
        store.write(step, fill())
    latest = store.latest()
    assert latest is not None and checkpoint_step(latest) == 1_000_000


def test_older_checkpoints_go_once_enough_newer_ones_are_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.write(step, fill())
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_a_protected_checkpoint_stays_however_old_until_another_is_protected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, fill())
    store.protected_step = 1
    for step in (2, 3, 4):
        store.write(step, fill())
        assert names(tmp_path) == ["step-000001", f"step-{step:06d}"]
    store.protected_step = 4
    store.prune(4)
    assert names(tmp_path) == ["step-000004"]


def test_pruning_leaves_later_checkpoints_alone(tmp_path: Path) -> None:
    """A run that passed over a damaged checkpoint writes the steps before it again."""
    store = CheckpointStore(tmp_path, keep=1)
    store.write(8, fill())
    store.write(6, fill())
    assert names(tmp_path) == ["step-000006", "step-000008"]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.write(1, fill())
    store.write(2, fill())
    (tmp_path / "step-000002" / "controller.json").write_text("")
    store.write(3, fill())
    assert "step-000001" in names(tmp_path)


def test_the_older_one_is_still_there_while_the_newer_one_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, fill())

    def look(folder: Path) -> None:
        assert find_damage(tmp_path / "step-000001") is None
        fill()(folder)

    store.write(2, look)
    assert names(tmp_path) == ["step-000002"]


def truncate(folder: Path) -> None:
    (folder / "learner" / "rank-0.bin").write_text("weig")


def flip(folder: Path) -> None:
    (folder / "learner" / "rank-0.bin").write_text("weighty")


def remove_file(folder: Path) -> None:
    (folder / "controller.json").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": {')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, r"learner/rank-0\.bin has 4 bytes instead of 7"),
        (flip, r"learner/rank-0\.bin does not have the checksum"),
        (remove_file, r"controller\.json is missing"),
        (remove_manifest, r"it has no manifest\.json"),
        (break_manifest, r"its manifest\.json is not readable"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    older = store.write(5, fill())
    damage(store.write(10, fill()))
    assert store.latest() == older
    (warning,) = store.warnings
    assert "step-000010 is damaged and was passed over" in warning
    assert re.search(said, warning)


def test_a_damaged_checkpoint_can_be_written_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.write(5, fill())
    truncate(store.write(10, fill()))
    folder = store.write(10, fill("better"))
    assert store.latest() == folder
    assert (folder / "learner" / "rank-0.bin").read_text() == "better"
    assert names(tmp_path) == ["step-000005", "step-000010"]


def test_a_writer_that_fails_leaves_nothing_and_its_error_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, fill())

    def fail(folder: Path) -> None:
        fill()(folder)
        raise RuntimeError("rank 1 died")

    with pytest.raises(RuntimeError, match="rank 1 died"):
        store.write(2, fail)
    assert names(tmp_path) == ["step-000001"]


def test_an_empty_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 3 is empty"):
        CheckpointStore(tmp_path, keep=1).write(3, lambda folder: None)
    assert names(tmp_path) == []


def test_a_kill_while_writing_leaves_the_older_checkpoint_and_no_rubbish(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from slipstream.observe.checkpoints import CheckpointStore\n"
        "store = CheckpointStore(Path(sys.argv[1]), keep=1)\n"
        "store.write(1, lambda folder: (folder / 'a').write_text('one') and None)\n"
        "def slow(folder):\n"
        "    (folder / 'a').write_text('tw'); print('writing', flush=True); time.sleep(60)\n"
        "store.write(2, slow)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    assert names(tmp_path) == ["step-000001", "step-000002.partial"]
    store = CheckpointStore(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000001"]
    assert store.latest() == tmp_path / "step-000001"
    assert store.warnings == []


def test_kills_at_random_moments_never_lose_the_last_complete_checkpoint(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from slipstream.observe.checkpoints import CheckpointStore\n"
        "store = CheckpointStore(Path(sys.argv[1]), keep=1)\n"
        "step = int(sys.argv[2])\n"
        "while True:\n"
        "    store.write(step, lambda folder: (folder / 'a').write_text(str(step) * 50_000) and None)\n"
        "    print(step, flush=True); step += 1\n"
    )
    done = 0
    for delay_s in (0.01, 0.05, 0.013, 0.08):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(done + 1)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        done = int(process.stdout.readline())
        time.sleep(delay_s)
        os.kill(process.pid, signal.SIGKILL)
        done = int((process.stdout.read().split() or [done])[-1])
        process.wait(timeout=10)
        store = CheckpointStore(tmp_path, keep=1)
        latest = store.latest()
        assert latest is not None and checkpoint_step(latest) in (done, done + 1)
        assert (latest / "a").read_text() == str(checkpoint_step(latest)) * 50_000
        done = checkpoint_step(latest)


def test_a_checkpoint_killed_just_before_its_rename_is_taken(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, keep=2).write(4, fill()).rename(tmp_path / "step-000004.partial")
    assert CheckpointStore(tmp_path, keep=2).latest() == tmp_path / "step-000004"


def test_what_a_killed_removal_left_is_removed(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, keep=2).write(4, fill()).rename(tmp_path / "step-000004.removed")
    assert CheckpointStore(tmp_path, keep=2).latest() is None
    assert names(tmp_path) == []


def test_a_full_disk_is_named_and_the_older_checkpoint_stays(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk / "checkpoints", keep=1)
    older = store.write(1, fill())
    with pytest.raises(TrainingError, match=rf"no space left .* checkpoint of step 2 in {tiny_disk}/checkpoints"):
        store.write(2, fill("x" * (2 << 20)))
    assert names(tiny_disk / "checkpoints") == ["step-000001"]
    assert store.latest() == older
    assert store.write(3, fill()) == store.latest(), "there is room again"


def test_a_full_disk_is_recognised_behind_an_error_without_a_number(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk / "checkpoints", keep=1)
    older = store.write(1, fill())

    def write(folder: Path) -> None:
        with contextlib.suppress(OSError):
            (folder / "weights").write_bytes(bytes(2 << 20))
        raise RuntimeError("file write failed")  # All that torch.save says of a full disk.

    with pytest.raises(TrainingError, match="no space left on the disk while saving the checkpoint of step 2"):
        store.write(2, write)
    assert store.latest() == older
