"""Which models tensor-parallel ranks can share, and what is said of the others before and on loading."""

import json
import re
from typing import Any

import pytest
from transformers import AutoConfig

from slipstream.errors import ConfigError, ModelError
from slipstream.models.tensor_plan import require_pieces, tensor_plan


def config_of(families: Any, name: str) -> Any:
    return AutoConfig.for_model(name, **(families.SIZES | families.FAMILIES[name].settings))


def test_the_table_of_families_says_which_have_a_plan_and_the_others_are_refused_with_what_works(families: Any) -> None:
    for name, family in families.FAMILIES.items():
        config = config_of(families, name)
        if family.in_pieces:
            assert tensor_plan(config, "m", "model.path"), name
        else:
            with pytest.raises(
                ModelError, match=rf"model\.path 'm' is of the family {name}.*sequence_parallel.*zero_st"
            ):
                tensor_plan(config, "m", "model.path")


def test_a_dry_run_knows_from_config_json_what_loading_would_refuse(families: Any) -> None:
    for name, family in families.FAMILIES.items():
        settings = json.loads(config_of(families, name).to_json_string(use_diff=False))
        require_pieces(settings, 1, path="m", key="critic.path")
        if family.in_pieces:
            require_pieces(settings, 2, path="m", key="critic.path")
        else:
            with pytest.raises(
                ModelError, match=rf"^training\.tensor_parallel: critic\.path 'm' is of the family {name}"
            ):
                require_pieces(settings, 2, path="m", key="critic.path")


def test_rules_match_the_weights_of_layers_and_neither_embeddings_nor_head(families: Any) -> None:
    rules = tensor_plan(config_of(families, "qwen3"), "m", "model.path")

    def kind(name: str) -> tuple[str, bool] | None:
        found = [rule for rule in rules if any(re.match(pattern, name) for pattern in rule["patterns"])]
        assert len(found) <= 1
        return (found[0]["partition_type"], found[0]["grad_allreduce"]) if found else None

    layer = "model.model.layers.11."
    assert kind(f"{layer}self_attn.q_proj.weight") == kind(f"{layer}mlp.up_proj.weight") == ("column", False)
    assert kind(f"{layer}self_attn.o_proj.weight") == kind(f"{layer}mlp.down_proj.weight") == ("row", False)
    assert kind(f"{layer}self_attn.q_norm.weight") == ("skip", True)
    assert kind(f"{layer}input_layernorm.weight") is kind("model.model.embed_tokens.weight") is None
    assert kind("head.weight") is kind("model.lm_head.weight") is None


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            r"\(4\) is more than .* that model\.path 'm' has \(3\).*tensor_parallel 3$",
        ),
        ({"num_attention_heads": 2}, r"\(4\) is more than .* that model\.path 'm' has \(2\).*tensor_parallel 2$"),
        (
            {"text_config": {"num_attention_heads": 1}},
            r"\(4\) is more than .* that model\.path 'm' has \(1\).*tensor_parallel 1$",
        ),
    ],
)
def test_more_ranks_than_heads_are_refused_with_the_nearest_number(heads: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^training\.tensor_parallel {words}"):
        require_pieces({"model_type": "llama", **heads}, 4, path="m", key="model.path")


def test_heads_need_not_be_shared_evenly() -> None:
    require_pieces({"model_type": "llama", "num_attention_heads": 3}, 2, path="m", key="model.path")
