"""What a learner writes to disk to go on from.

The caller gives a fresh folder and makes it permanent afterwards (write aside, fsync, rename); nothing here renames.
A checkpoint holds DeepSpeed's own files (weights, optimizer), the random states of every rank, and a description that
is compared before anything is loaded.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from slipstream.errors import RunDirectoryError, TrainingError
from slipstream.training.universal_checkpoint import converted

DEEPSPEED_TAG = "engine"
DESCRIPTION_FILE = "learner.json"

# What may be another at load time, and how it is called.
LAYOUT = {"ranks": "ranks", "zero_stage": "ZeRO stage"}
# How torch words a write that the file system refused; it raises RuntimeError without errno.
TORCH_WRITE_FAILURES = ("PytorchStreamWriter", "file write failed", "unexpected pos", "write failed")


@contextmanager
def storage_errors(folder: Path, what: str) -> Iterator[None]:
    """Turn a failed write into a TrainingError that names the folder and the reason."""
    try:
        yield
    except OSError as error:
        raise TrainingError(_storage_message(folder, what, error.strerror or str(error))) from error
    except Exception as error:
        # safetensors has an exception type of its own, which carries the system's words.
        if not any(words in str(error) for words in (*TORCH_WRITE_FAILURES, "os error", "I/O error")):
            raise
        raise TrainingError(_storage_message(folder, what, str(error).splitlines()[0])) from error


def _storage_message(folder: Path, what: str, reason: str) -> str:
    return f"cannot write {what} to {folder}: {reason}; free space there or choose another output_dir, then resume"


def save_checkpoint(engine: Any, folder: Path, *, description: dict[str, Any], has_adapter: bool = False) -> None:
    """Write the state of one rank; all ranks must call it with the same folder. Raises TrainingError if it fails.

    Of a model with an adapter the weights that do not learn are left out.
    """
    with storage_errors(folder, "a checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        engine.save_checkpoint(str(folder), tag=DEEPSPEED_TAG, save_latest=False, exclude_frozen_parameters=has_adapter)
        torch.save(_random_states(), folder / _random_state_file(distributed.get_rank()))
        if distributed.get_rank() == 0:
            (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1))
    distributed.barrier()


def load_checkpoint(
    engine: Any, folder: Path, *, description: dict[str, Any], seed: int, has_adapter: bool = False
) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote into this rank; returns its description.

    `description` is that of the learner being loaded into; the keys both have must agree, except `optimizer_step`, and
    `ranks` and `zero_stage` where DeepSpeed can convert. A rank that did not exist then takes its random states from
    `seed`. Raises RunDirectoryError for a folder that is no checkpoint or one of another learner.
    """
    file = folder / DESCRIPTION_FILE
    if not file.is_file():
        raise RunDirectoryError(f"no learner checkpoint in {folder}: {DESCRIPTION_FILE} is missing")
    saved: dict[str, Any] = json.loads(file.read_text())
    _compare(saved, description, folder)
    if _is_loaded_as_it_is(saved, description):
        _load_engine(engine, folder, has_adapter=has_adapter)
    else:
        stages = {"from_stage": saved["zero_stage"], "to_stage": description["zero_stage"]}
        with converted(folder, DEEPSPEED_TAG, **stages) as universal:
            _load_universal(engine, universal, has_adapter=has_adapter)
    states = folder / _random_state_file(distributed.get_rank())
    if states.is_file():
        _restore_random_states(torch.load(states, weights_only=False))
    else:
        _seed_random_states(seed + distributed.get_rank())
    return saved


def layout_change(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """What is different in the layout of the ranks, in words; None where a checkpoint is loaded as it was written."""
    changes = [f"{words} {saved[key]} to {current[key]}" for key, words in LAYOUT.items() if saved[key] != current[key]]
    return ", ".join(changes) or None


def _is_loaded_as_it_is(saved: dict[str, Any], current: dict[str, Any]) -> bool:
    # At stage 0 every rank holds everything, so their number does not matter.
    return saved["zero_stage"] == current["zero_stage"] and (
        saved["zero_stage"] == 0 or saved["ranks"] == current["ranks"]
    )


def _load_engine(engine: Any, folder: Path, *, has_adapter: bool) -> None:
    loaded, _ = engine.load_checkpoint(
        str(folder), tag=DEEPSPEED_TAG, load_lr_scheduler_states=False, load_module_strict=not has_adapter
    )
    if loaded is None:
        raise RunDirectoryError(f"the learner checkpoint in {folder} lacks DeepSpeed's files in {DEEPSPEED_TAG}/")


def _load_universal(engine: Any, folder: Path, *, has_adapter: bool) -> None:
    settings = [{key: value for key, value in g.items() if key != "params"} for g in engine.optimizer.param_groups]
    # DeepSpeed takes this from its configuration when it starts, and looks at it when it loads and at no other time.
    # Starting with it would mean to know what is loaded before anything is.
    engine._config.load_universal_checkpoint = True
    try:
        _load_engine(engine, folder, has_adapter=has_adapter)
    finally:
        engine._config.load_universal_checkpoint = False
    # At stage 3 it gives all groups the settings of the first one, weight decay among them, and one count of steps,
    # which each of them would then advance.
    for group, values in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(values)
    for state in engine.basic_optimizer.state.values():
        state["step"] = torch.as_tensor(state["step"]).clone()


def _compare(saved: dict[str, Any], current: dict[str, Any], folder: Path) -> None:
    # Where nothing is said of it, every rank had whole weights.
    saved = {"tensor_parallel": 1, **saved}
    change = layout_change(saved, current)
    if change is not None and saved["tensor_parallel"] > 1:
        raise RunDirectoryError(
            f"checkpoint {folder} has weights in pieces (training.tensor_parallel {saved['tensor_parallel']}), and "
            f"goes on with the layout it was written with only; this run changes {change}"
        )
    if saved["zero_stage"] != current["zero_stage"] and 0 in (saved["zero_stage"], current["zero_stage"]):
        raise RunDirectoryError(
            f"checkpoint {folder} was written with ZeRO stage {saved['zero_stage']}, this run has ZeRO stage "
            f"{current['zero_stage']}: stages 1, 2 and 3 can go over into each other, and 0 into none; set "
            f"training.zero_stage to {saved['zero_stage'] or 0}"
        )
    for key, words in (("tensor_parallel", "training.tensor_parallel"), ("dtype", "type"), ("lora", "LoRA adapter")):
        if saved[key] != current[key]:
            raise RunDirectoryError(
                f"checkpoint {folder} was written with {words} {saved[key]}, this run has {words} {current[key]}; "
                f"resume with the configuration it was written with"
            )
    names = [*saved["shapes"], *(name for name in current["shapes"] if name not in saved["shapes"])]
    for name in names:
        before, now = saved["shapes"].get(name), current["shapes"].get(name)
        if before != now:
            raise RunDirectoryError(
                f"checkpoint {folder} belongs to another model: weight {name!r} has shape {before or 'none'} there and "
                f"{now or 'none'} in {current['model_path']}; it was written for {saved['model_path']}"
            )
    if saved["model"] != current["model"]:
        same_place = saved["model_path"] == current["model_path"]
        raise RunDirectoryError(
            f"checkpoint {folder} belongs to another model of the same shape: it was written for "
            f"{saved['model_path']}, this run has {current['model_path']}"
            f"{', whose files have changed since' if same_place else ''}; bring the model back, or start a new run "
            "with another output_dir"
        )


def _random_state_file(rank: int) -> str:
    return f"random_state_rank_{rank}.pt"


def _random_states() -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def _seed_random_states(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
