"""A Hugging Face folder of what a learner has learned, for others to use.

The caller gives a fresh folder and makes it permanent afterwards (write aside, fsync, rename); nothing here renames.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from slipstream.config.lora import LoraConfig
from slipstream.models.loading import from_folder_or_hub
from slipstream.models.lora import ADAPTER_FOLDER, save_adapter
from slipstream.models.stored_weights import model_tensors
from slipstream.training.checkpoint import storage_errors
from slipstream.training.whole_weights import WholeWeights

# Files beside the weights that a folder needs to be served: copied, because loading and saving would change them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)


def export_weights(
    weights: WholeWeights, folder: Path, *, model_path: str, lora: LoraConfig | None, writes: bool
) -> None:
    """Put the weights together on all ranks, and write them as `export_model` does on the one that `writes`.

    An adapter is merged into them, and lies beside them in `adapter/` as peft writes it. Returns once the folder is
    complete, on all ranks. Raises TrainingError if the disk is full.
    """
    model = weights.model
    state = {name: tensor.cpu() for name, tensor in model_tensors(model).items() if name not in weights.shapes}
    for name, tensor in weights.each_parameter():
        if writes:
            state[name] = tensor.cpu().clone()
    if writes:
        export_model(model, folder, state=state, model_path=model_path)
    if lora is not None:
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with weights.gathered(learned), storage_errors(folder, "the adapter"):
            if writes:
                save_adapter(model, folder / ADAPTER_FOLDER, config=lora, model_path=model_path)
    distributed.barrier()


def export_model(model: Any, folder: Path, *, state: dict[str, torch.Tensor], model_path: str) -> None:
    """Write a Hugging Face folder that Transformers and vLLM load: weights, configuration, tokenizer files.

    `state` holds the weights by Hugging Face name; the rest comes from `model_path` as it is there. A critic that came
    from a language model becomes a classifier with one label. Called on rank 0.
    """
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    with storage_errors(folder, "the exported model"), from_folder_or_hub(model_path):
        folder.mkdir(parents=True, exist_ok=True)
        with _without_generation_settings(model):
            model.save_pretrained(folder, state_dict=state)
        # Training runs with dropout and cache switched off; the export has them as the original.
        config = AutoConfig.from_pretrained(model_path)
        config.architectures = [type(model).__name__]
        config.num_labels = model.config.num_labels
        config.dtype = model.dtype
        config.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        for name in TOKENIZER_FILES:
            source = cached_file(
                model_path,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if source is not None:
                shutil.copyfile(source, folder / name)


@contextmanager
def _without_generation_settings(model: Any) -> Iterator[None]:
    """Real models ship generation settings that saving refuses; the file is copied instead."""
    from transformers import GenerationConfig

    if not model.can_generate():
        yield
        return
    generation_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = generation_config
