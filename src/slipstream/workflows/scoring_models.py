"""What a model scores, as its config.json says: whole answers, the steps of answers, or nothing.

For the checks before a run starts, which need no torch; `models/loading.py` makes the same distinction on loading.
"""

from typing import Any, Literal

from slipstream.config.reward_model import SEQUENCE_CLASSIFIER, STEP_SEPARATOR, TOKEN_CLASSIFIER
from slipstream.config.schema import RewardConfig
from slipstream.errors import ModelError
from slipstream.workflows.model_facts import local_folder, read_json

ScoredUnit = Literal["answers", "steps"]
CLASSIFIERS: dict[ScoredUnit, str] = {"answers": SEQUENCE_CLASSIFIER, "steps": TOKEN_CLASSIFIER}
NAMES: dict[ScoredUnit, str] = {"answers": "a reward model of whole answers", "steps": "a process reward model"}


def scored_unit(settings: dict[str, Any]) -> ScoredUnit | None:
    """What a model with this config.json scores; None for one that is no reward model."""
    architectures = settings.get("architectures") or []
    for unit, classifier in CLASSIFIERS.items():
        if any(classifier in name for name in architectures):
            return unit
    return None


def require_reward_model(settings: dict[str, Any], reward: RewardConfig, *, path: str, prefix: str) -> None:
    """Raise ModelError where the model at `path` with this config.json cannot score as `reward` says."""
    key, aggregation = f"{prefix}reward.model", f"{prefix}reward.step_aggregation"
    unit = scored_unit(settings)
    if unit is None:
        found = ", ".join(settings.get("architectures") or []) or "a model that names no architecture"
        raise ModelError(f"{key}: {path!r} is {found}, no reward model; train one with `slipstream reward-model`")
    if unit == "steps" and reward.step_aggregation is None:
        raise ModelError(
            f"{key}: {path!r} is {NAMES[unit]}, which scores steps and no whole answers; set {aggregation}, which "
            "makes one score of them, or give a reward model trained on pairs"
        )
    if unit == "answers" and reward.step_aggregation is not None:
        raise ModelError(
            f"{key}: {path!r} is {NAMES[unit]}, which scores no steps; remove {aggregation}, or give a process reward "
            "model"
        )
    # Transformers writes no labels where there are two.
    labels = len(settings.get("id2label") or range(2))
    if labels != 1:
        raise ModelError(f"{key}: {path!r} is a classifier with {labels} labels; a reward model has one")
    if unit == "steps" and not settings.get(STEP_SEPARATOR):
        raise ModelError(
            f"{key}: {path!r} does not say what stands between steps (no {STEP_SEPARATOR} in its config.json); train "
            "it with `slipstream reward-model`, or write the text it was trained with there"
        )


def require_start(path: str, *, key: str, scores: ScoredUnit) -> None:
    """Raise ModelError where a local model, from which one that `scores` this is to be trained, scores the other."""
    folder = local_folder(path)
    found = None if folder is None else scored_unit(read_json(folder / "config.json"))
    if found is not None and found != scores:
        raise ModelError(f"{key}: {path!r} is {NAMES[found]}; expected {NAMES[scores]} or a causal language model")
