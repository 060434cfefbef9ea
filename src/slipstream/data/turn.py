"""The turns of an episode as text. Apart from `trajectory.py`, so that processes that run a reward need no NumPy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One message of an episode.

    `role` is that of the row's message (system, user, assistant, tool), `prompt` for a whole prompt as the model saw it
    where the row has one text and no messages, `assistant` for what the policy said, `environment` for what it was told
    after that.
    """

    role: str
    text: str
