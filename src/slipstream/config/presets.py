"""Presets of the algorithm: names of the field for combinations of pieces.

A preset sets keys of `algorithm` and nothing else; what a recipe gives goes before it. Only what differs from the
defaults of the schema is listed. Each piece is documented where it is computed, in `algorithms/`.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from slipstream.config.base import Section

PresetName = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "dapo",
    "gspo",
    "cispo",
    "distillation",
]

_KL_IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "kl_coefficient": 0.01}

PRESETS: dict[str, dict[str, Any]] = {
    # PPO for language models: arXiv 1707.06347 with GAE (arXiv 1506.02438) and the KL in the reward (arXiv 1909.08593).
    "ppo": {"advantage": "gae", "gae_lambda": 0.95, "whiten_advantages": True, **_KL_IN_REWARD},
    # DeepSeekMath, arXiv 2402.03300, averaged over tokens instead of sequences; without KL unless one is asked for.
    "grpo": {},
    # arXiv 2503.20783: neither the standard deviation nor the length of a response changes its weight.
    "dr_grpo": {"normalize_by_std": False, "aggregation": "constant_length"},
    # arXiv 2402.14740: a response is one action, its baseline the mean of the others.
    "rloo": {
        "advantage": "leave_one_out",
        "policy_loss": "policy_gradient",
        "aggregation": "sequence_mean_token_sum",
        **_KL_IN_REWARD,
    },
    # arXiv 2501.03262: returns of single answers, normalised over the whole batch.
    "reinforce_pp": {"advantage": "returns", "whiten_advantages": True, **_KL_IN_REWARD},
    # arXiv 2501.03262, the variant for several answers per prompt.
    "reinforce_pp_baseline": {
        "advantage": "group",
        "normalize_by_std": False,
        "whiten_advantages": True,
        "kl_coefficient": 0.01,
        "kl_estimator": "k2",
    },
    # arXiv 2310.10505: the greedy answer is the baseline.
    "remax": {
        "advantage": "greedy_baseline",
        "policy_loss": "policy_gradient",
        "aggregation": "sequence_mean_token_sum",
        **_KL_IN_REWARD,
    },
    # arXiv 2503.14476.
    "dapo": {
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong_filtering": True,
        "shaping": {"overlong_buffer_share": 0.2},
    },
    # arXiv 2507.18071: the ratio of a whole sequence, so the bounds are much narrower.
    "gspo": {
        "policy_loss": "sequence_clip",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    # arXiv 2506.13585: no token loses its gradient; the weight is bounded above only.
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # On-policy distillation: the student's own answers, each token graded by the teacher (MiniLLM, arXiv 2306.08543;
    # GKD, arXiv 2306.13649). It needs algorithm.teacher, and no reward.
    "distillation": {"advantage": "teacher"},
}

assert set(PRESETS) == set(get_args(PresetName))


def with_preset(values: Any) -> Any:
    """The values of the `algorithm` section with what the preset sets where they give nothing.

    A bare name stands for `{preset: NAME}`. Anything that is not a section, or names no preset, is returned as it is,
    for the schema to refuse.
    """
    if isinstance(values, str):
        values = {"preset": values}
    if not isinstance(values, Mapping):
        return values
    preset = values.get("preset", "grpo")
    if not isinstance(preset, str) or preset not in PRESETS:
        return values
    return _filled(values, PRESETS[preset])


def preset_keys(preset: str) -> dict[str, Any]:
    """What a preset sets, by dotted key below `algorithm`."""
    return _flat(PRESETS[preset], prefix="")


def did_you_mean(value: str, known: Sequence[str]) -> str:
    """The end of an error message: the nearest known name, if one is near."""
    near = difflib.get_close_matches(value, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _filled(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    filled = dict(values)
    for name, default in defaults.items():
        given = filled.get(name)
        if isinstance(given, Section):
            given = given.model_dump(exclude_unset=True)
        if isinstance(default, Mapping) and isinstance(given, Mapping):
            filled[name] = _filled(given, default)
        elif name not in filled:
            filled[name] = default
    return filled


def _flat(settings: Mapping[str, Any], *, prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, prefix=f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
