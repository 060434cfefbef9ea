"""How sequences lie in one row of tokens: segments end to end, some of which continue another one.

Made from the lengths and prompts of a packed batch (`data/packing.py`) for attention over the row
(`models/attention.py`). Leaves out what the tokens are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from slipstream.errors import ModelError


@dataclass(frozen=True)
class Run:
    """`count` neighbouring segments of one length, in `rows` of the row, all of which continue what is in `prompt`."""

    rows: slice
    count: int
    length: int
    prompt: slice | None

    @property
    def prompt_length(self) -> int:
        """0 for segments that continue nothing."""
        return 0 if self.prompt is None else self.prompt.stop - self.prompt.start


class RowLayout:
    """A row of segments. `prompts[i]` is the number of the one that segment i continues, None where it begins.

    `tokens` is the length of the row, `longest` that of the longest sequence in it. `segments` are pairs (rows,
    prompt): where each segment lies, and what it continues, None where it begins. `answers` are pairs (prompt, rows):
    all tokens in `rows` continue the tokens in `prompt`.
    """

    def __init__(self, lengths: Sequence[int], prompts: Sequence[int | None] | None = None) -> None:
        """Raises ModelError for prompts that are not of the row, or continue another segment themselves."""
        continued = [None] * len(lengths) if prompts is None else list(prompts)
        if len(continued) != len(lengths):
            raise ModelError(f"a packed row of {len(lengths)} segments was given the prompts of {len(continued)}")
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        for number, prompt in enumerate(continued):
            if prompt is not None and not (0 <= prompt < number and continued[prompt] is None):
                raise ModelError(f"segment {number} of a packed row continues segment {prompt}, which begins nothing")
        self.lengths = tuple(lengths)
        self.tokens = starts[-1]
        rows = [slice(start, stop) for start, stop in pairwise(starts)]
        prompt_rows = [None if prompt is None else rows[prompt] for prompt in continued]
        self.segments = list(zip(rows, prompt_rows, strict=True))
        self.runs = _runs(self.segments)
        self.longest = max((run.prompt_length + run.length for run in self.runs), default=0)
        self.answers = [
            (prompt, slice(first.rows.start, last.rows.stop))
            for prompt, first, last in _neighbours(self.runs)
            if prompt is not None
        ]
        self._masks: dict[tuple[int | None, torch.dtype, torch.device], torch.Tensor] = {}

    def mask(self, run: Run, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """What is added to the scores of a run: [length, prompt length + length], 0 where a token sees, else -inf.

        A token sees itself and what precedes it, with a `window` no more than so many tokens. `like` gives type and
        device. All runs and all layers have views of one tensor, since autograd keeps it until the backward pass.
        """
        most_before = max(run.prompt_length for run in self.runs)
        key = (window, like.dtype, like.device)
        if key not in self._masks:
            most = max(run.length for run in self.runs)
            seen = torch.ones(most, most_before + most, dtype=torch.bool, device=like.device).tril(most_before)
            if window is not None:
                seen = seen.triu(most_before + 1 - window)
            self._masks[key] = torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -torch.inf)
        return self._masks[key][: run.length, most_before - run.prompt_length : most_before + run.length]


def cut(tensor: torch.Tensor, rows: slice, count: int = 1) -> torch.Tensor:
    """[heads, T, ...] -> [count, heads, rows / count, ...], a view."""
    return tensor[:, rows].unflatten(1, (count, -1)).transpose(0, 1)


def joined(parts: torch.Tensor) -> torch.Tensor:
    """[count, heads, length, ...] -> [heads, count * length, ...]."""
    return parts.transpose(0, 1).flatten(1, 2)


def _runs(segments: Sequence[tuple[slice, slice | None]]) -> list[Run]:
    def kind(pair: tuple[slice, slice | None]) -> tuple[int, int, int]:
        own, prompt = pair
        return (own.stop - own.start, *((-1, -1) if prompt is None else (prompt.start, prompt.stop)))

    runs = []
    for (length, *_), neighbours in groupby(segments, key=kind):
        members = list(neighbours)
        if length:
            whole = slice(members[0][0].start, members[-1][0].stop)
            runs.append(Run(whole, len(members), length, members[0][1]))
    return runs


def _neighbours(runs: Sequence[Run]) -> list[tuple[slice | None, Run, Run]]:
    """(prompt, first run, last run) of neighbours that continue the same."""
    found = []
    for _, neighbours in groupby(runs, key=lambda run: None if run.prompt is None else run.prompt.start):
        members = list(neighbours)
        found.append((members[0].prompt, members[0], members[-1]))
    return found
