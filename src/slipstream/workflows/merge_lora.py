"""Merges a LoRA adapter, as peft writes it, into the model it was trained on: an ordinary model folder comes out.

W + scale * B A for every weight that the adapter has a pair A, B for (arXiv 2106.09685, section 4.1), which peft
computes. That the adapter belongs to the model is checked: every one of its weights must have found its place, and the
merged model must compute what model and adapter compute.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ModelError
from slipstream.models.output_folder import require_free, written_whole

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
HEAD = "score.weight"
"""End of the name of a reward model's head among the adapter's weights; it has a row for each label."""

PROBE_TOKENS = 8
# What rounding may differ by, of the largest of the numbers compared: merging rounds each weight once more.
PROBE_TOLERANCE = {"float32": 1e-3, "other": 0.1}


def merge_lora(adapter: Path, out: Path, *, base: str | None = None) -> None:
    """Write the model with the adapter in `adapter` merged into it, and its tokenizer, to the folder `out`.

    The weights keep the type that the base has. `base` is a model folder or hub name; None takes the one that the
    adapter names. The tokenizer is the adapter's, if it has one, else that of the base.

    Raises ModelError if `adapter` is no LoRA adapter of a language or reward model, does not belong to the base, or if
    `out` holds something.
    """
    require_free(out)
    settings = _read_settings(adapter)
    base = base or settings.get("base_model_name_or_path")
    if not base:
        raise ModelError(f"{adapter / CONFIG_FILE} names no base model; name it by --base")
    model = _load_base(base, adapter, settings)
    merged = _merge(model, adapter, base)

    from slipstream.training.export import TOKENIZER_FILES, export_model

    with written_whole(out) as partial:
        export_model(merged, partial, state=merged.state_dict(), model_path=base)
        if (adapter / "tokenizer_config.json").is_file():
            for name in TOKENIZER_FILES:
                if (adapter / name).is_file():
                    shutil.copyfile(adapter / name, partial / name)


def _read_settings(adapter: Path) -> dict[str, Any]:
    """The adapter's configuration. Raises ModelError if there is none, or it is one of another kind."""
    file = adapter / CONFIG_FILE
    if not file.is_file():
        raise ModelError(f"{adapter} is no adapter: it has no {CONFIG_FILE}; expected a folder that peft has written")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        kind = settings["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is no configuration of an adapter: {type(error).__name__}: {error}") from error
    if kind != "LORA":
        raise ModelError(f"{file}: peft_type is {kind!r}; only LORA adapters can be merged")
    if not any((adapter / name).is_file() for name in WEIGHT_FILES):
        raise ModelError(f"{adapter} has no weights; expected {' or '.join(WEIGHT_FILES)}")
    return dict(settings)


def _load_base(base: str, adapter: Path, settings: dict[str, Any]) -> PreTrainedModel:
    """The base in the type of its weights; a classifier where the adapter is one of a classifier."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from slipstream.models.loading import from_folder_or_hub

    disable_progress_bar()
    set_verbosity_error()  # a new head is no news: the adapter brings it
    kinds = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}
    task = settings.get("task_type")
    if task not in kinds:
        raise ModelError(f"{adapter / CONFIG_FILE}: task_type is {task!r}, expected one of {', '.join(kinds)}")
    try:
        labels = {"num_labels": _labels(adapter)} if task == "SEQ_CLS" else {}
        with from_folder_or_hub(base):
            model: PreTrainedModel = kinds[task].from_pretrained(base, dtype="auto", **labels)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the base model {base!r} of {adapter}: {_reason(error)}") from error
    return model.eval()


def _labels(adapter: Path) -> int:
    """Rows of the classifier's head that the adapter brings; 1, a reward model's, where it brings none."""
    from safetensors import safe_open

    if not (adapter / WEIGHT_FILES[0]).is_file():
        raise ModelError(f"{adapter} has no {WEIGHT_FILES[0]}, which the adapter of a reward model must have")
    with safe_open(adapter / WEIGHT_FILES[0], "pt") as weights:
        heads = [name for name in weights.keys() if name.endswith(HEAD)]  # noqa: SIM118  it is no dict
        return int(weights.get_slice(heads[0]).get_shape()[0]) if heads else 1


def _merge(model: PreTrainedModel, adapter: Path, base: str) -> Any:
    import torch
    from safetensors import SafetensorError

    with redirect_stdout(sys.stderr):  # DeepSpeed, which peft imports if it is there, has its log on standard output
        from peft import PeftConfig, get_peft_model
    try:
        config = PeftConfig.from_pretrained(str(adapter))
        config.base_model_name_or_path = model.name_or_path
        both: Any = get_peft_model(model, config)
        report = both.load_adapter(str(adapter), both.active_adapter, torch_device="cpu")
        with torch.no_grad():
            before = _probe(both)
            merged = both.merge_and_unload(safe_merge=True)
            after = _probe(merged)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the adapter {adapter} does not fit the model {base!r}: {_reason(error)}") from error
    strays = [*report.missing_keys, *report.unexpected_keys]
    if strays:
        raise ModelError(
            f"the adapter {adapter} does not belong to the model {base!r}: {len(strays)} weights have no counterpart, "
            f"such as {strays[0]!r}; name the model it was trained on by --base"
        )
    tolerance = PROBE_TOLERANCE["float32" if merged.dtype == torch.float32 else "other"]
    difference = (before - after).abs().max().item()
    if not difference <= tolerance * max(1.0, before.abs().max().item()):
        raise ModelError(
            f"the adapter {adapter} cannot be merged into {base!r}: the merged model differs from model and adapter by "
            f"{difference:.3g}, as where a weight with an adapter is tied to one without"
        )
    return merged


def _probe(model: Any) -> torch.Tensor:
    """What the model makes of a few tokens, none of which is padding."""
    import torch

    padding = model.config.get_text_config().pad_token_id
    tokens = [token for token in range(1, PROBE_TOKENS + 2) if token != padding][:PROBE_TOKENS]
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits.float()


def _reason(error: Exception) -> str:
    """The first two lines of an error as one: that of torch names what is wrong in its second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
