"""The checksum of a tensor: how a publish proves that what arrived is what was sent.

XXH3 over the raw bytes: two values in exchanged places, a sign of zero or one NaN payload for another change it. It
guards against mistakes (a stale, truncated, reordered or converted tensor), not against an adversary.
"""

import torch
import xxhash


def tensor_checksum(tensor: torch.Tensor) -> int:
    """64-bit XXH3 of the tensor's bytes in row-major order, whatever its strides and its device.

    Shape and type are not part of it: they travel in the weight plan.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)
