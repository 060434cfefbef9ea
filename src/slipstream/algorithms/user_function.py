"""What a user's own function returned, checked before anything is computed from it.

Used by `advantages.py` and `shaping.py`, which take a function in place of a piece of ours.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import TrainingError


def checked_numbers(result: object, function: Callable[..., Any], *, kind: str, size: int) -> Tensor:
    """Return `result`, detached and in float64, if it is a tensor of `size` finite numbers.

    Raises TrainingError that says which function of which kind ("advantage") it was, what it returned and what it
    should.
    """
    # Functions have a name; callable objects say of themselves what they are.
    name = f"the {kind} function {getattr(function, '__qualname__', str(function))}"
    if not isinstance(result, Tensor):
        raise TrainingError(f"{name} must return a tensor of shape [{size}], found {type(result).__name__}")
    if result.shape != (size,):
        raise TrainingError(f"{name} must return a tensor of shape [{size}], found shape {list(result.shape)}")
    bad = (~torch.isfinite(result)).nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        raise TrainingError(f"{name} must return finite numbers, found {float(result[first])} at position {first}")
    return result.detach().double()
