"""The exponential of a log-ratio, kept finite.

Two log-probs of one token can differ by hundreds when a policy has collapsed. exp() then overflows, and an infinity
times the zero gradient of a branch that was not taken is NaN: one such token would cost the whole optimizer step.
"""

import torch
from torch import Tensor

LARGEST_EXPONENT = 20.0
"""exp(20) is 5e8: far beyond any ratio that training can use, far below the float32 maximum of 3e38."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(x) up to x = `LARGEST_EXPONENT` and its tangent line beyond. Any shape.

    A plain clamp would be finite too, but its gradient is 0 beyond the bound, and a loss that holds exp(x) - x would
    then push the policy away from the reference instead of towards it. The tangent keeps the direction.
    """
    bounded = log_ratio.clamp(max=LARGEST_EXPONENT)
    return torch.exp(bounded) * (1.0 + (log_ratio - bounded))
