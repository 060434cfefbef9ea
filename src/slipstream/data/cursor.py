"""The place in the data: which rows come next, in an order that a resumed run continues exactly.

The controllers take prompts and examples from here; the checkpoint holds `state()`. The order of an epoch is computed
from the seed and the epoch's number alone, so the state is two numbers however long the run has been going on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from slipstream.data.trajectory import IntArray
from slipstream.errors import DataError


class Tokenized(Protocol):
    """What a cursor goes over: prompts, training examples."""

    @property
    def tokens(self) -> IntArray:
        """Ids, one dimension."""


Item = TypeVar("Item", bound=Tokenized)


@dataclass(frozen=True)
class Draw(Generic[Item]):
    """An item drawn at one moment. `draw_id` is `"{epoch}-{position}"`: unique within a run."""

    draw_id: str
    item: Item


def fingerprint(items: Sequence[Tokenized]) -> str:
    """Changes if any item's tokens, or the order or number of items does."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(len(item.tokens).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(item.tokens, dtype=np.int64).tobytes())
    return digest.hexdigest()


class RowCursor(Generic[Item]):
    """Draws items without end: every one once per epoch, in a new order each epoch if `shuffle`."""

    def __init__(self, items: Sequence[Item], *, seed: int, shuffle: bool) -> None:
        if not items:
            raise DataError("there is no row to draw from")
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint(items)
        self._first_epoch = 0
        self._move_to(0, 0)

    def take(self, count: int) -> list[Draw[Item]]:
        """The next `count` items; crosses from one epoch into the next as often as needed."""
        taken = []
        for _ in range(count):
            item = self._items[int(self._order[self._position])]
            taken.append(Draw(draw_id=f"{self._epoch}-{self._position}", item=item))
            self._position += 1
            if self._position == len(self._items):
                self._move_to(self._epoch + 1, 0)
        return taken

    def find(self, draw_id: str) -> Draw[Item] | None:
        """What was drawn under this id; None if that was from other data, which is gone (`restore`)."""
        epoch, position = map(int, draw_id.split("-"))
        if epoch < self._first_epoch:
            return None
        return Draw(draw_id, self._items[int(self._order_of(epoch)[position])])

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on from here; plain JSON. At an epoch's end it says where the next one begins."""
        return {
            "fingerprint": self._fingerprint,
            "first_epoch": self._first_epoch,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Go on where `state` was taken. The cursor must have been made with the same seed and shuffle.

        A place in other data has no meaning here: the cursor then starts at the beginning, and False is returned. It
        counts that as a new epoch, so that draw ids stay unique within the run.
        """
        if state["fingerprint"] != self._fingerprint:
            self._first_epoch = state["epoch"] + 1
            self._move_to(self._first_epoch, 0)
            return False
        self._first_epoch = state["first_epoch"]
        self._move_to(state["epoch"], state["position"])
        return True

    def _move_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> IntArray:
        if self._shuffle:
            return np.random.default_rng([self._seed, epoch]).permutation(len(self._items))
        return np.arange(len(self._items))
