"""Loading a model for training: packed attention, no dropout, and words for all that can fail.

A policy is a causal language model, a critic or a reward model one with a head that gives one number
(models/value.py).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from slipstream.config.reward_model import SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER
from slipstream.data.hub import hub_or_cache
from slipstream.errors import ModelError
from slipstream.models.attention import PACKED_ATTENTION
from slipstream.models.log_probs import verify_head
from slipstream.models.quantization import require_trainable_weights
from slipstream.models.value import VALUE_HEAD, VALUE_HEAD_BIAS, VALUE_HEAD_WEIGHT, verify_value_head
from slipstream.models.verification import require_known_layers, verify_packing

WEIGHT_FILE_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
# Configuration keys that make the forward pass of a model in training mode random. Log-probs must not be: the first
# ratio of new to old would no longer be 1.
RANDOMNESS_WORDS = ("dropout", "pdrop", "drop_rate", "jitter_noise")

# What heads of reward and classification models are called. One that is there and not of our form would be left out
# silently, and a new one made.
HEAD_NAMES = ("score.", "classifier.", "v_head.", "value_head.", "regression_head.")


def load_policy(
    path: str, *, dtype: str, key: str = "model.path", activation_checkpointing: bool = False
) -> PreTrainedModel:
    """A causal language model from a local folder or the hub, on the CPU, in training mode without any randomness.

    `dtype` is "float32" or "bfloat16", `key` the configuration key that `path` stands in. Raises ModelError if the
    folder, its configuration or its weights are missing, the hub cannot be reached, the model computes log-probs in a
    way that is not known here, or its tokens meet elsewhere than in attention.
    """
    config = _read_config(path, key)
    model, report = _load_weights(AutoModelForCausalLM, path, config=config, dtype=dtype, key=key)
    _require_complete(report["missing_keys"], path, key)
    verify_packing(model, path, key)
    verify_head(model)
    return _ready_to_train(model, activation_checkpointing=activation_checkpointing)


def load_value_model(
    path: str, *, dtype: str, key: str, activation_checkpointing: bool = False, needs_head: bool = False
) -> PreTrainedModel:
    """A model with one number per token in place of logits: a sequence-classification model with one label.

    From a reward model, whose head it keeps, or from a causal language model, which gets a head of zeros. `key` is the
    configuration key that `path` stands in. Otherwise as `load_policy`; raises ModelError also for a model with
    several labels or a head that is not one matrix, for a process reward model, and for a language model where
    `needs_head`.
    """
    config = _read_config(path, key)
    if _is_a(TOKEN_CLASSIFIER, config):
        found = f"{path!r} is a process reward model, which scores steps and no whole answers"
        remedy = "set reward.step_aggregation, which makes one score of them" if needs_head else None
        raise ModelError(f"{key}: {found}; {_expected('a reward model trained on pairs', remedy)}")
    is_classifier = _is_a(SEQUENCE_CLASSIFIER, config)
    if needs_head and not is_classifier:
        raise ModelError(
            f"{key}: {path!r} is {_architecture(config)}, no reward model; expected a sequence-classification model "
            "with one label, as `slipstream reward-model` exports it"
        )
    return _load_with_head(
        path,
        config,
        dtype=dtype,
        key=key,
        is_classifier=is_classifier,
        activation_checkpointing=activation_checkpointing,
    )


def load_process_reward_model(
    path: str, *, dtype: str, key: str, activation_checkpointing: bool = False, needs_head: bool = False
) -> PreTrainedModel:
    """A model that scores the steps of an answer: a token-classification model with one label.

    As `load_value_model`; raises ModelError also for a reward model of whole answers, and for a model family of which
    Transformers has no token-classification class.
    """
    config = _read_config(path, key)
    if _is_a(SEQUENCE_CLASSIFIER, config):
        found = f"{path!r} is a reward model of whole answers, which scores no steps"
        remedy = "remove reward.step_aggregation" if needs_head else None
        raise ModelError(f"{key}: {found}; {_expected('a process reward model', remedy)}")
    is_classifier = _is_a(TOKEN_CLASSIFIER, config)
    if needs_head and not is_classifier:
        raise ModelError(
            f"{key}: {path!r} is {_architecture(config)}, no process reward model; expected a token-classification "
            "model with one label, as `slipstream reward-model` with supervision: steps exports it"
        )
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"{key}: Transformers has no token-classification class for {path!r} ({_architecture(config)}), which a "
            "process reward model is; choose a model of another family, such as Llama or Qwen3"
        )
    return _load_with_head(
        path,
        config,
        dtype=dtype,
        key=key,
        is_classifier=is_classifier,
        scores_tokens=True,
        activation_checkpointing=activation_checkpointing,
    )


def _expected(kind: str, remedy: str | None) -> str:
    """What to do about a model of the other kind; a language model serves too where no `remedy` is needed."""
    return f"expected {kind} or a causal language model" if remedy is None else f"{remedy}, or give {kind}"


def _is_a(kind: str, config: Any) -> bool:
    return any(kind in name for name in config.architectures or ())


def _architecture(config: Any) -> str:
    return ", ".join(config.architectures or ()) or "a model that names no architecture"


def _load_with_head(
    path: str,
    config: Any,
    *,
    dtype: str,
    key: str,
    is_classifier: bool,
    scores_tokens: bool = False,
    activation_checkpointing: bool,
) -> PreTrainedModel:
    """A classifier with one label. Raises ModelError for several labels, weights that lack and heads of other forms."""
    if is_classifier and config.num_labels != 1:
        raise ModelError(
            f"{key}: {path!r} is a classifier with {config.num_labels} labels; expected a reward model (one label) or "
            f"a causal language model"
        )
    config.num_labels = 1
    model_class = AutoModelForTokenClassification if scores_tokens else _value_class(config, path, key)
    model, report = _load_weights(model_class, path, config=config, dtype=dtype, key=key)
    foreign_heads = sorted(name for name in report["unexpected_keys"] if name.startswith(HEAD_NAMES))
    head = getattr(model, VALUE_HEAD, None)
    has_form = isinstance(head, torch.nn.Linear) and (scores_tokens or head.bias is None)
    if foreign_heads or not has_form:
        found = foreign_heads[0] if foreign_heads else f"a {type(model).__name__} without it"
        raise ModelError(f"{key}: {path!r} has no head of the form {VALUE_HEAD}.weight; found {found}")
    missing = set(report["missing_keys"])
    if not is_classifier:
        for name in missing & {VALUE_HEAD_WEIGHT, VALUE_HEAD_BIAS}:
            missing.remove(name)
            # Random values would be noise in the first advantages.
            torch.nn.init.zeros_(model.get_parameter(name))
    _require_complete(missing, path, key)
    verify_packing(model, path, key)
    verify_value_head(model)
    return _ready_to_train(model, activation_checkpointing=activation_checkpointing)


def _value_class(config: Any, path: str, key: str) -> Any:
    """The sequence-classification class of a family; made here, as Transformers makes its own, where it has none.

    An export of the latter kind loads here again, but not with Transformers alone.
    """
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return AutoModelForSequenceClassification
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{key}: {path!r} is neither a causal language model nor a reward model")
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    base = next(kind for kind in causal.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.replace("ForCausalLM", "ForSequenceClassification")
    return type(name, (GenericForSequenceClassification, base), {})


def _load_weights(
    model_class: Any, path: str, *, config: Any, dtype: str, key: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model and what Transformers reports of loading it."""
    # Annotated for the type checker, which thinks a model comes alone whatever is asked for.
    loaded: Any
    try:
        with from_folder_or_hub(path):
            loaded = model_class.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=PACKED_ATTENTION,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        # KeyError: a family that chooses its attention from a table of its own.
        raise ModelError(f"{key}: cannot load a model from {path!r}: {_first_line(error)}") from error
    model, report = loaded
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    return model.eval(), report


def _require_complete(missing_keys: Collection[str], path: str, key: str) -> None:
    if missing_keys:
        # Transformers would make these up at random and only warn.
        missing = sorted(missing_keys)
        raise ModelError(f"{key}: {path!r} lacks {len(missing)} weights of the model, such as {missing[0]!r}")


def _ready_to_train(model: PreTrainedModel, *, activation_checkpointing: bool) -> PreTrainedModel:
    if activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@contextmanager
def from_folder_or_hub(path: str) -> Iterator[None]:
    """Within it, a hub name is looked up in the local cache at once where the hub does not answer."""
    if Path(path).is_dir():
        yield
    else:
        with hub_or_cache():
            yield


def _read_config(path: str, key: str) -> Any:
    """The configuration of a model without what would make its forward pass random."""
    # A progress bar per process, in a log nobody watches, helps nobody.
    disable_progress_bar()
    with from_folder_or_hub(path):
        config = _load_config(path, key)
    require_known_layers(config, path, key)
    quantization = getattr(config, "quantization_config", None)
    require_trainable_weights({"quantization_config": quantization}, path=path, key=key)
    for section in (config, getattr(config, "text_config", None)):
        _remove_randomness(section)
    return config


def _load_config(path: str, key: str) -> Any:
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{key}: folder {path!r} has no config.json; expected a Hugging Face model folder")
        if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILE_PATTERNS):
            raise ModelError(f"{key}: folder {path!r} has no weights; expected {' or '.join(WEIGHT_FILE_PATTERNS)}")
    elif folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(f"{key}: no folder {path!r}; expected a Hugging Face model folder or a hub name")
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        if folder.is_dir():
            raise ModelError(f"{key}: cannot read {path}/config.json: {_first_line(error)}") from error
        raise ModelError(
            f"{key}: {path!r} is not a local folder, and the Hugging Face hub did not give a model of that name "
            f"({_first_line(error)}). Check the name and the connection, or give a local folder"
        ) from error


def _remove_randomness(section: Any) -> None:
    if section is None:
        return
    for name, value in section.to_dict().items():
        if isinstance(value, float) and any(word in name for word in RANDOMNESS_WORDS):
            setattr(section, name, 0.0)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
