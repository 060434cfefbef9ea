"""Merging an adapter: the merged model computes what base and adapter compute, or there is no folder and a reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slipstream.errors import ModelError
from slipstream.workflows.merge_lora import merge_lora

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 200]])
KINDS = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """make_adapter(base, **settings of LoraConfig): a folder with an adapter that changes what the base computes."""

    def make(base: Path, *, task: str = "CAUSAL_LM", dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        labels = {"num_labels": 1} if task == "SEQ_CLS" else {}
        model = KINDS[task].from_pretrained(base, dtype=dtype, **labels)
        adapted = get_peft_model(
            model, LoraConfig(**{"r": 4, "target_modules": "all-linear"} | settings, task_type=task)
        )
        generator = torch.Generator().manual_seed(5)
        for name, weight in adapted.named_parameters():
            if "lora_B" in name or name.endswith("score.modules_to_save.default.weight"):
                torch.nn.init.normal_(weight, std=0.2, generator=generator)
        folder = tmp_path / "adapter"
        adapted.save_pretrained(folder)
        return folder

    return make


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return result.float()


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "r": 2}, {"use_dora": True}, {"bias": "all"}], ids=str)
def test_the_merged_model_computes_what_base_and_adapter_do(
    tiny_policy: Path, make_adapter: Callable[..., Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    adapter = make_adapter(tiny_policy, **settings)
    merge_lora(adapter, tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, adapter))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32))
    assert (merged - expected).abs().max() <= 1e-5
    assert (before - expected).abs().max() > 0.1
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_policy / name).read_bytes()


def test_the_type_of_the_weights_is_that_of_the_base(
    tiny_policy: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_policy, base)
    AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.bfloat16).save_pretrained(base)
    merge_lora(make_adapter(base, dtype=torch.bfloat16), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_of_a_reward_model_brings_its_head(
    tiny_policy: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_policy, task="SEQ_CLS", target_modules=["q_proj", "v_proj"])
    merge_lora(adapter, tmp_path / "out")
    base = AutoModelForSequenceClassification.from_pretrained(tiny_policy, num_labels=1, dtype=torch.float32)
    expected = logits(PeftModel.from_pretrained(base, adapter))
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert merged.config.num_labels == 1 and logits(merged) == pytest.approx(expected, abs=1e-5)
    assert expected.abs().item() > 0.01


def test_a_tokenizer_beside_the_adapter_goes_before_that_of_the_base(
    tiny_policy: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_policy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_policy / name, adapter / name)
    (adapter / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    merge_lora(adapter, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_a_base_that_has_moved_is_named_by_the_caller(
    tiny_policy: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_policy)
    change(adapter, base_model_name_or_path="/gone/away")
    refused(adapter, tmp_path, "cannot load the base model '/gone/away'")
    merge_lora(adapter, tmp_path / "out", base=str(tiny_policy))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    change(adapter, base_model_name_or_path=None)
    refused(adapter, tmp_path, "names no base model; name it by --base")


def another_policy(folder: Path, tokenizer: Any, **sizes: int) -> Path:
    from slipstream.config.schema import ScratchPolicyConfig
    from slipstream.models.scratch import create_policy

    given = {"hidden_size": 64, "layers": 2, "heads": 2, "intermediate_size": 128, "vocabulary_size": 320} | sizes
    create_policy(ScratchPolicyConfig(max_tokens=64, **given), tokenizer, seed=0, folder=folder)
    return folder


@pytest.mark.parametrize(
    ("sizes", "targets", "message"),
    [
        ({"hidden_size": 96, "heads": 3}, "all-linear", "does not fit the model"),
        ({"layers": 1}, ["q_proj"], "does not belong to the model .* have no counterpart"),
        ({"layers": 3}, ["q_proj"], "does not belong to the model .* have no counterpart"),
    ],
    ids=["wider", "fewer layers", "more layers"],
)
def test_an_adapter_of_another_model_is_refused(
    tiny_policy: Path,
    tiny_tokenizer: Any,
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    sizes: dict[str, int],
    targets: Any,
    message: str,
) -> None:
    other = another_policy(tmp_path / "other", tiny_tokenizer, **sizes)
    adapter = make_adapter(tiny_policy, target_modules=targets)
    refused(adapter, tmp_path, message, base=str(other))


def test_an_adapter_of_one_of_two_tied_weights_is_refused(
    tiny_policy: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    assert json.loads((tiny_policy / "config.json").read_text())["tie_word_embeddings"]
    refused(make_adapter(tiny_policy, target_modules=["lm_head"]), tmp_path, "tied to one without")


def test_what_is_no_adapter_is_named(tiny_policy: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    refused(tiny_policy, tmp_path, "is no adapter: it has no adapter_config.json")
    adapter = make_adapter(tiny_policy)
    change(adapter, peft_type="PREFIX_TUNING")
    refused(adapter, tmp_path, "peft_type is 'PREFIX_TUNING'; only LORA adapters can be merged")
    change(adapter, peft_type="LORA", task_type="SEQ_2_SEQ_LM")
    refused(adapter, tmp_path, "task_type is 'SEQ_2_SEQ_LM', expected one of CAUSAL_LM, SEQ_CLS")
    change(adapter, task_type="CAUSAL_LM")
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    refused(adapter, tmp_path, "does not fit the model|cannot load")
    weights.unlink()
    refused(adapter, tmp_path, "has no weights; expected adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("[]")
    refused(adapter, tmp_path, "is no configuration of an adapter")


def test_nothing_is_written_over(tiny_policy: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        merge_lora(make_adapter(tiny_policy), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def change(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def refused(adapter: Path, folder: Path, message: str, *, base: str | None = None) -> None:
    """The merge raises that message and leaves nothing behind."""
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ModelError, match=message):
        merge_lora(adapter, folder / "refused", base=base)
    assert sorted(path.name for path in folder.iterdir()) == before
