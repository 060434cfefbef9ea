"""The policy's weights out of a checkpoint, in this process: for looking at a policy without going on with its run.

Up to ZeRO stage 2 they are in a file of tensors. Stage 3 has them in pieces, beside its optimizer; DeepSpeed's own
converter puts those together. It unpickles what the optimizer wrote: take only checkpoints of your own runs. Of a
tensor-parallel run each rank's pieces are read in this way, and put together here.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import RunDirectoryError
from slipstream.training.checkpoint import DEEPSPEED_TAG, DESCRIPTION_FILE
from slipstream.training.tensor_shards import find_cut

PREFIX = "model."
"""Before the Hugging Face name of each weight: the model is a part of the module that is trained."""

PARTITIONED_STAGE = 3


def read_description(learner: Path) -> dict[str, Any]:
    """What the learner's checkpoint says of itself: `model_path`, `zero_stage`, `dtype` and others.

    Raises RunDirectoryError for a folder that is no checkpoint of a learner.
    """
    file = learner / DESCRIPTION_FILE
    try:
        description: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"no checkpoint of a learner in {learner}: {DESCRIPTION_FILE}: {error}") from error
    return description


def read_weights(learner: Path) -> dict[str, torch.Tensor]:
    """The weights by Hugging Face name, on the CPU. Raises RunDirectoryError for a checkpoint that is damaged."""
    description = read_description(learner)
    if description.get("has_adapter"):
        raise RunDirectoryError(
            f"the checkpoint in {learner} holds an adapter and no model; take the exported model of the run"
        )
    try:
        is_partitioned = description["zero_stage"] == PARTITIONED_STAGE
        read = _gathered if is_partitioned else _stored
        pieces = [_weights(read(learner, rank)) for rank in range(description.get("tensor_parallel", 1))]
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RunDirectoryError(f"the checkpoint in {learner} cannot be read: {error}; take another one") from error
    shapes: dict[str, list[int]] = description["shapes"]
    missing = sorted(name for name in shapes if any(name not in weights for weights in pieces))
    if missing:
        raise RunDirectoryError(f"the checkpoint in {learner} lacks the weight {missing[0]!r}; take another one")
    return pieces[0] | {name: _whole([weights[name] for weights in pieces], shape) for name, shape in shapes.items()}


def _weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(PREFIX): weight for name, weight in state.items() if name.startswith(PREFIX)}


def _whole(pieces: list[torch.Tensor], shape: list[int]) -> torch.Tensor:
    """A weight of this shape from the pieces of the tensor-parallel ranks, of which it may be that each has all."""
    cut = find_cut(tuple(shape), [tuple(piece.shape) for piece in pieces])
    return pieces[0] if cut is None else torch.cat(pieces, dim=cut.dimension)


def _stored(learner: Path, tensor_rank: int) -> dict[str, torch.Tensor]:
    file = learner / DEEPSPEED_TAG / f"mp_rank_{tensor_rank:02d}_model_states.pt"
    state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)["module"]
    return state


def _gathered(learner: Path, tensor_rank: int) -> dict[str, torch.Tensor]:
    """By the converter, which takes all files of a folder for those of one tensor-parallel rank."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own) / DEEPSPEED_TAG
        folder.mkdir()
        for file in (learner / DEEPSPEED_TAG).glob(f"*_mp_rank_{tensor_rank:02d}_*.pt"):
            (folder / file.name).symlink_to(file.absolute())
        # The converter prints what it does.
        with redirect_stdout(sys.stderr):
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            state: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(own, tag=DEEPSPEED_TAG)
    return state
