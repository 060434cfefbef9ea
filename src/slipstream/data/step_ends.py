"""Where the steps of an answer end, in its own tokens: the places at which a process reward model is read.

The same search is made in data that a model learns from and in trajectories that it scores, on token ids in both, so
that training and scoring read the same places. Nothing is tokenized to find them.
"""

from typing import TYPE_CHECKING

import numpy as np

from slipstream.data.tokenizer import control_tokens
from slipstream.data.trajectory import BoolArray, IntArray
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StepEnds:
    """Finds the steps of answers, which a separator divides.

    An answer is spelled token by token, control tokens left out unless the separator holds them. A step ends at the
    token with which its separator is complete, even if that token already begins the next step; the last step, which
    needs no separator, ends at the last token of the answer, as a rule the one that ends the turn. What is blank is no
    step, and of steps that end in one token only one is counted.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", separator: str) -> None:
        """Raises ConfigError for a separator that the tokens of `tokenizer` do not spell one by one."""
        self._tokenizer = tokenizer
        self._separator = separator
        self._control = control_tokens(tokenizer)
        self._pieces: dict[int, str] = {}
        spelled = "".join(self._piece(token) for token in tokenizer(separator, add_special_tokens=False)["input_ids"])
        if separator not in spelled:
            raise ConfigError(
                f"step_separator: the tokenizer of {tokenizer.name_or_path or 'this model'!r} does not keep "
                f"{separator!r}: its tokens, one by one, spell {spelled!r}; choose another text between steps"
            )

    def find(self, tokens: IntArray, is_answer: BoolArray) -> IntArray:
        """The last places of all steps, ascending. `tokens` and `is_answer` have length L.

        What lies between tokens that are none of the answer is an answer of its own, and ends a step.
        """
        places = np.flatnonzero(is_answer)
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        ends = [end for run in runs if run.size for end in self._ends_of_run(tokens, run)]
        return np.unique(np.asarray(ends, dtype=np.int64))

    def _ends_of_run(self, tokens: IntArray, run: IntArray) -> list[int]:
        pieces = [self._piece(int(token)) for token in tokens[run]]
        text = "".join(pieces)
        # Characters up to the end of each token.
        borders = np.cumsum([len(piece) for piece in pieces])
        ends, begin = [], 0
        while (place := text.find(self._separator, begin)) >= 0:
            end = place + len(self._separator)
            if text[begin:place].strip():
                ends.append(int(run[np.searchsorted(borders, end)]))
            begin = end
        if text[begin:].strip():
            ends.append(int(run[-1]))
        return ends

    def _piece(self, token: int) -> str:
        """What a token spells by itself."""
        if token not in self._pieces:
            piece = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
            is_silent = token in self._control and piece not in self._separator
            self._pieces[token] = "" if is_silent else piece
        return self._pieces[token]
