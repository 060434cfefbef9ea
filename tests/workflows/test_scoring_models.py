"""What scores steps and what scores answers are told apart before a run starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import RewardConfig
from slipstream.errors import ModelError
from slipstream.workflows.scoring_models import require_reward_model, require_start

ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
ANSWERS: dict[str, Any] = {"architectures": ["LlamaForSequenceClassification"]} | ONE_LABEL
STEPS: dict[str, Any] = {"architectures": ["LlamaForTokenClassification"], "step_separator": "; "} | ONE_LABEL


@pytest.mark.parametrize(
    ("settings", "aggregation", "problem"),
    [
        (ANSWERS, None, None),
        (STEPS, "min", None),
        (STEPS, None, r"is a process reward model, .* set rl\.reward\.step_aggregation"),
        (ANSWERS, "min", r"is a reward model of whole answers, .* remove rl\.reward\.step_aggregation"),
        (STEPS | {"step_separator": ""}, "min", "does not say what stands between steps"),
        (STEPS | {"id2label": {"0": "a", "1": "b"}}, "min", "is a classifier with 2 labels"),
        (ANSWERS | {"id2label": None}, None, "is a classifier with 2 labels"),
        ({"architectures": ["LlamaForCausalLM"]}, None, "is LlamaForCausalLM, no reward model"),
        ({}, "min", "is a model that names no architecture, no reward model"),
    ],
)
def test_a_model_scores_as_it_is_asked_to_or_is_refused(settings: dict, aggregation: Any, problem: str | None) -> None:
    reward = RewardConfig(model="m", step_aggregation=aggregation)
    if problem is None:
        require_reward_model(settings, reward, path="m", prefix="rl.")
        return
    with pytest.raises(ModelError, match=rf"^rl\.reward\.model: 'm' {problem}"):
        require_reward_model(settings, reward, path="m", prefix="rl.")


def test_training_starts_from_a_language_model_or_one_of_its_own_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(STEPS))
    require_start(str(tmp_path), key="model.path", scores="steps")
    with pytest.raises(
        ModelError, match=r"^critic\.path: .* is a process reward model; expected a reward model of whole"
    ):
        require_start(str(tmp_path), key="critic.path", scores="answers")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    require_start(str(tmp_path), key="critic.path", scores="answers")
    require_start("some/hub-name", key="critic.path", scores="answers")
