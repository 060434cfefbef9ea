"""A checkpoint for another number of ranks, or another ZeRO stage, than it was written with.

DeepSpeed writes what each rank holds. Its universal format has a folder for each tensor instead, with weights and
optimizer states in float32 and whole, of which each rank then reads what it needs. The conversion is made when it is
needed, beside the checkpoint, and removed when all ranks have read it.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
import torch.distributed as distributed

from slipstream.errors import RunDirectoryError

# DeepSpeed's names: the file with what a whole checkpoint has in common, at stages 1 and 2 and at stage 3.
COMMON_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
PARTITIONED_STAGE = 3


@contextmanager
def converted(folder: Path, tag: str, *, from_stage: int, to_stage: int) -> Iterator[Path]:
    """The checkpoint `tag` in `folder` in the universal format; gives the folder to load `tag` from, meanwhile.

    All ranks must call it; rank 0 converts. Raises RunDirectoryError on all of them where that fails.
    """
    # Named so that the checkpoint store removes what a process that was killed left of it.
    target = folder.parent.with_name(f"{folder.parent.name}-{folder.name}.partial")
    is_first = distributed.get_rank() == 0
    failures: list[str | None] = [None]
    try:
        if is_first:
            try:
                _convert(folder / tag, target / tag)
                if to_stage == PARTITIONED_STAGE != from_stage:
                    _lead_to_partitioned(target / tag)
                if from_stage == PARTITIONED_STAGE != to_stage:
                    _lead_from_partitioned(target / tag)
            except Exception as error:  # whatever it is, the other ranks wait for an answer
                failures = [f"{type(error).__name__}: {error}"]
        distributed.broadcast_object_list(failures)
        if failures[0] is not None:
            raise RunDirectoryError(
                f"the checkpoint in {folder} cannot be converted for another number of ranks or ZeRO stage: "
                f"{failures[0]}; resume with the ones it was written with"
            )
        yield target
        distributed.barrier()
    finally:
        if is_first:
            shutil.rmtree(target, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    with redirect_stdout(sys.stderr):  # the converter prints what it does
        from deepspeed.checkpoint import ds_to_universal

        ds_to_universal.main(
            Namespace(
                input_folder=str(source),
                output_folder=str(target),
                # In this process: children of an engine would outlive it.
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


# The universal format is not the same at all stages. What follows says in the words of the stage that reads what the
# other one wrote: the number of optimizer steps, and which file is which.


def _lead_to_partitioned(folder: Path) -> None:
    """A conversion of stage 1 or 2 for stage 3, which looks for the number of steps beside the settings."""
    shutil.copyfile(folder / COMMON_FILES[0], folder / COMMON_FILES[1])
    file = folder / "zero" / "optimizer_state.pt"
    state = torch.load(file, weights_only=False)
    steps = torch.load(next((folder / "zero").rglob("step.pt")), weights_only=False)
    state["optimizer_state_dict"] = {"state": {0: {"step": steps}}, "param_groups": state["param_groups"]}
    torch.save(state, file)


def _lead_from_partitioned(folder: Path) -> None:
    """A conversion of stage 3 for stages 1 and 2, which look for the number of steps beside each tensor."""
    shutil.copyfile(folder / COMMON_FILES[1], folder / COMMON_FILES[0])
    file = folder / "zero" / "optimizer_state.pt"
    state = torch.load(file, weights_only=False)
    steps = state["optimizer_state_dict"]["state"][0]["step"]
    version = torch.load(folder / COMMON_FILES[0], weights_only=False)["ds_version"]
    torch.save({"param_groups": state["param_groups"], "ds_version": version}, file)
    for weights in (folder / "zero").rglob("fp32.pt"):
        for tensor in weights.parent.glob("*.pt"):
            torch.save({"param": torch.load(tensor)}, tensor)
        torch.save(steps, weights.with_name("step.pt"))
