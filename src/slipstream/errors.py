"""The errors a user can meet. Every message names what was found, what was expected and what to do.

The command line prints the message of a `SlipstreamError` on one line, without a traceback, and exits with
`exit_code`. Anything else that escapes is a defect of ours and keeps its traceback.
"""


class SlipstreamError(Exception):
    """Base of all errors that tell the user what to do."""

    exit_code = 1
    is_fault = False
    """Whether the same run may succeed when it is started again: nothing in its input was wrong."""


class ConfigError(SlipstreamError):
    """A configuration key is unknown, mistyped, out of range, or contradicts another one."""

    exit_code = 2


class DataError(SlipstreamError):
    """A dataset cannot be read or does not hold what the configuration says."""

    exit_code = 2


class ModelError(SlipstreamError):
    """A model folder lacks what is needed: weights, tokenizer, chat template."""

    exit_code = 2


class RunDirectoryError(SlipstreamError):
    """A run directory exists with another configuration, or holds no usable checkpoint."""

    exit_code = 2


class RewardError(SlipstreamError):
    """A reward function failed and the configured policy is to stop."""


class EngineError(SlipstreamError):
    """An engine (a Ray actor) died, raised, or did not answer before its deadline."""


class EngineLostError(EngineError):
    """An engine died or did not answer before its deadline. One that is started in its place can do its work."""

    is_fault = True


class WeightSyncError(SlipstreamError):
    """A rollout engine does not hold the trainer's weights after a publish."""


class TrainingError(SlipstreamError):
    """Training cannot go on: non-finite values three steps in a row, no group with signal, or no space to save."""
