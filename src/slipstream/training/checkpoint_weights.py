"""The policy's weights out of a checkpoint, in this process: for looking at a policy without going on with its run.

Up to ZeRO stage 2 they are in a file of tensors. Stage 3 has them in pieces, beside its optimizer; DeepSpeed's own
converter puts those together. It unpickles what the optimizer wrote: take only checkpoints of your own runs.
"""

from __future__ import annotations

import json
import pickle
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import RunDirectoryError
from slipstream.training.checkpoint import DEEPSPEED_TAG, DESCRIPTION_FILE

PREFIX = "model."
"""Before the Hugging Face name of each weight: the model is a part of the module that is trained."""

WHOLE_WEIGHTS = "mp_rank_00_model_states.pt"
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
        if description["zero_stage"] == PARTITIONED_STAGE:
            state = _gathered(learner)
        else:
            file = learner / DEEPSPEED_TAG / WHOLE_WEIGHTS
            state = torch.load(file, map_location="cpu", weights_only=True)["module"]
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RunDirectoryError(f"the checkpoint in {learner} cannot be read: {error}; take another one") from error
    weights = {name.removeprefix(PREFIX): weight for name, weight in state.items() if name.startswith(PREFIX)}
    if weights.keys() != description["shapes"].keys() | weights.keys():
        missing = min(description["shapes"].keys() - weights.keys())
        raise RunDirectoryError(f"the checkpoint in {learner} lacks the weight {missing!r}; take another one")
    return weights


def _gathered(learner: Path) -> dict[str, torch.Tensor]:
    # The converter prints what it does.
    with redirect_stdout(sys.stderr):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(learner), tag=DEEPSPEED_TAG)
    return state
