"""Several sources as one: what is drawn comes from each in proportion to its weight, at every length of the run.

Each source keeps its own order and its own epochs. Which source is next follows from the weights and the seed alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.data.cursor import Draw, RowCursor, Tokenized
from slipstream.data.prompts import DropReport
from slipstream.data.trajectory import Prompt, PromptOccurrence

Item = TypeVar("Item", bound=Tokenized)


@dataclass(frozen=True)
class Mixture(Generic[Item]):
    """The items of each source by its name, and the weights of the sources. A source alone is named ''."""

    parts: Mapping[str, Sequence[Item]]
    weights: Mapping[str, float]

    @property
    def items(self) -> list[Item]:
        """The items of all sources, one source after the other."""
        return [item for part in self.parts.values() for item in part]


def build_mixture(
    config: DataConfig, build: Callable[[DataConfig, str], tuple[list[Item], DropReport]]
) -> tuple[Mixture[Item], dict[str, DropReport]]:
    """Have `build` make the items of every source of a data section, and return them with the report of each.

    `build` is given the section of one source and what is to stand before the row numbers of its items.
    """
    parts, reports = {}, {}
    for name, part in config.parts.items():
        parts[name], reports[name] = build(part, f"{name}:" if name else "")
    return Mixture(parts, config.weights), reports


class MixtureCursor(Generic[Item]):
    """Draws items without end: from every source by its weight, and each source's own as `RowCursor` does.

    The k-th draw goes to the source that is furthest behind its share of k, so the counts never stray from the weights
    by more than a few rows; the seed decides how the sources alternate.
    """

    def __init__(self, mixture: Mixture[Item], *, seed: int, shuffle: bool) -> None:
        self._names = list(mixture.parts)
        weights = np.array([mixture.weights[name] for name in self._names], dtype=np.float64)
        self._shares = weights / weights.sum()
        self._head_starts = np.random.default_rng([seed, len(self._names)]).random(len(self._names))
        self._cursors = [RowCursor(mixture.parts[name], seed=seed, shuffle=shuffle) for name in self._names]
        self._drawn = np.zeros(len(self._names), dtype=np.int64)

    def take(self, count: int) -> list[Draw[Item]]:
        """The next `count` items. Ids of draws carry the name of the source where there are several."""
        taken = []
        for _ in range(count):
            behind = self._shares * (self._drawn.sum() + 1) + self._head_starts - self._drawn
            place = int(behind.argmax())
            (draw,) = self._cursors[place].take(1)
            self._drawn[place] += 1
            name = self._names[place]
            taken.append(Draw(f"{name}:{draw.draw_id}", draw.item) if name else draw)
        return taken

    def find(self, draw_id: str) -> Draw[Item] | None:
        """What was drawn under this id; None if that was from data that is gone, see `RowCursor.find`."""
        name, _, of_source = draw_id.rpartition(":")
        draw = self._cursors[self._names.index(name)].find(of_source)
        return None if draw is None else Draw(draw_id, draw.item)

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on from here; plain JSON."""
        return {
            name: {"drawn": int(drawn), **cursor.state()}
            for name, drawn, cursor in zip(self._names, self._drawn, self._cursors, strict=True)
        }

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Go on where `state` was taken. Must have been made with the same seed, shuffle and names.

        Returns the names of the sources that have other rows than they had; those begin anew.
        """
        changed = []
        for place, (name, cursor) in enumerate(zip(self._names, self._cursors, strict=True)):
            if not cursor.restore(state[name]):
                changed.append(name)
            self._drawn[place] = state[name]["drawn"]
        return changed


class PromptCursor:
    """A `MixtureCursor` over prompts, whose draws are prompt occurrences: the draw's id names the group."""

    def __init__(self, prompts: Mixture[Prompt], *, seed: int, shuffle: bool) -> None:
        self._cursor = MixtureCursor(prompts, seed=seed, shuffle=shuffle)

    def take(self, count: int) -> list[PromptOccurrence]:
        """The next `count` prompts, see `MixtureCursor.take`."""
        return [PromptOccurrence(group_id=draw.draw_id, prompt=draw.item) for draw in self._cursor.take(count)]

    def find(self, group_id: str) -> PromptOccurrence | None:
        """The prompt that was drawn for a group; None if the data is no longer what it was."""
        draw = self._cursor.find(group_id)
        return None if draw is None else PromptOccurrence(group_id=draw.draw_id, prompt=draw.item)

    def state(self) -> dict[str, Any]:
        """See `MixtureCursor.state`."""
        return self._cursor.state()

    def restore(self, state: dict[str, Any]) -> list[str]:
        """See `MixtureCursor.restore`."""
        return self._cursor.restore(state)
