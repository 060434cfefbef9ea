"""Where the seeds of sampling come from: one function, so that no two engines can draw the same samples by accident.

A seed depends on the run's seed, on what is being sampled for, and on the group: not on the engine, the batch or the
order of requests. A group is therefore sampled alike whichever engine it goes to, and a resumed run repeats it.
"""

import hashlib

# vLLM and torch seed a 32-bit Mersenne Twister; with 31 bits here, `seed + sample index` never wraps.
SEED_BITS = 31


def group_seed(run_seed: int, group_id: str, *, purpose: str) -> int:
    """Seed of a group's first sample; sample i is drawn with this plus i.

    `purpose` keeps streams apart that may share group ids, such as "training" and "evaluation-20". The result lies in
    [0, 2**31) and is a hash: neighbouring groups do not get neighbouring seeds, whose samples would overlap.
    """
    text = f"{run_seed}\x1f{purpose}\x1f{group_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
