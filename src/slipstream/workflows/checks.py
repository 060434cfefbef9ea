"""Checks made before anything starts: files exist and can be read, columns exist, lengths fit the model.

They need the file system and nothing heavy, so a dry run makes them too. Names on the hub are left to load time,
and so is running any of the user's code.
"""

import difflib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.config.algorithm import ADVANTAGES, POLICY_LOSSES, AlgorithmConfig
from slipstream.config.base import Section
from slipstream.config.data import REASONING_GYM_PREFIX, DataConfig
from slipstream.config.evaluation import FIRST_SET
from slipstream.config.generate import AnsweringConfig, GenerateConfig
from slipstream.config.loader import dump_config, pipeline_stages
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import SCORE_MOMENTS, RewardModelConfig, SupervisedConfig
from slipstream.config.schema import (
    EvaluationConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    SFTConfig,
)
from slipstream.data.columns import Layout, name_columns
from slipstream.data.source import FILE_TYPES, Row, load_rows
from slipstream.errors import ConfigError, DataError, ModelError, RunDirectoryError, SlipstreamError
from slipstream.import_path import check_function
from slipstream.models.quantization import require_trainable_weights
from slipstream.observe.run_directory import RunDirectory, differences_text, parse_config, require_run_or_empty
from slipstream.rewards.function import check_reward_spec
from slipstream.workflows.model_facts import (
    has_chat_template,
    local_folder,
    looks_like_path,
    read_json,
    read_model_facts,
)
from slipstream.workflows.scoring_models import ScoredUnit, require_reward_model, require_start
from slipstream.workflows.tensor_layout import check_tensor_layout, check_tensor_layouts, check_worker_layout

WHOLE_FILE_BYTES = 64 << 20
"""Data up to this size is read whole here; of larger JSON lines only the first `SAMPLE_BYTES`."""
SAMPLE_BYTES = 1 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
REASONING_GYM_COLUMNS = ("question", "answer", "metadata")

Workflow = RLConfig | SupervisedConfig | AnsweringConfig | PipelineConfig


def check_config(config: Workflow, *, reward: Callable[..., Any] | None = None) -> None:
    """Everything that can be known to be wrong before the run starts; the first problem raises.

    `reward`: a function given from Python, in place of `reward.function`. Raises RunDirectoryError, ModelError,
    DataError or ConfigError with a message that names the key.
    """
    check_output_dir(config)
    if isinstance(config, PipelineConfig):
        check_tensor_layouts(config)
        _check_pipeline(config, reward=reward)
        return
    check_model(config)
    if isinstance(config, RewardModelConfig):
        scores: ScoredUnit = "answers" if config.supervision == "pairs" else "steps"
        require_start(config.model.path, key="model.path", scores=scores)
    check_lengths(config, model_limit(config.model.path))
    _check_sources(config, prefix="", reward=reward)
    if isinstance(config, RLConfig | SupervisedConfig):
        check_tensor_layout(config)
    if isinstance(config, RLConfig | AnsweringConfig):
        check_worker_layout(config)


def check_output_dir(config: Workflow) -> None:
    """Raise RunDirectoryError where `output_dir` is a file, cannot be written, or holds a run already."""
    path = Path(config.output_dir)
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"output_dir {path} is a file; choose another output_dir")
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"output_dir {path} cannot be made: no permission to write in {existing}")
    require_run_or_empty(path)
    if not (path / "config.yaml").exists():
        return
    run = RunDirectory.open(path)
    if not run.has_begun and not run.in_use:
        return
    differing = differences_text(parse_config(run.config_text), parse_config(dump_config(config)))
    if differing:
        raise RunDirectoryError(
            f"output_dir {path} holds a run with another configuration ({differing}); choose another output_dir"
        )
    if run.in_use:
        raise RunDirectoryError(
            f"output_dir {path} is in use: this very run is going on there; choose another output_dir"
        )
    if run.finished:
        raise RunDirectoryError(f"output_dir {path} holds this very run, finished; choose another output_dir")
    raise RunDirectoryError(
        f"output_dir {path} holds this very run, unfinished; go on with `slipstream resume {path}`, "
        "or choose another output_dir"
    )


def check_model(config: RLConfig | SupervisedConfig | AnsweringConfig) -> None:
    """Raise ModelError where a local model folder lacks configuration, weights, tokenizer or chat template."""
    folder = _check_folder(config.model.path)
    if folder is None:
        return
    if isinstance(config, RLConfig | SupervisedConfig):
        require_trainable_weights(read_json(folder / "config.json"), path=config.model.path, key="model.path")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model.path: folder {config.model.path!r} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}: "
            "save it there with tokenizer.save_pretrained"
        )
    for key, data in _data_of(config):
        if data.apply_chat_template and not has_chat_template(folder):
            raise ModelError(
                f"model.path: the tokenizer in {config.model.path!r} has no chat template; use a chat model, or set "
                f"{key}.apply_chat_template false and write the prompt with {key}.prompt_template"
            )


def check_critic(config: RLConfig, *, prefix: str = "") -> None:
    """Raise ModelError where a local folder for the critic is none, or its tokens are not those of the policy.

    Raises ConfigError where the longest sequence would not fit it.
    """
    path = config.critic.path
    if not config.has_critic or path is None:
        return
    _check_reader(path, config.model.path, key=f"{prefix}critic.path", model="the critic")
    require_start(path, key=f"{prefix}critic.path", scores="answers")
    check_lengths(config, model_limit(path), prefix=prefix, model="the critic")


def check_reward_model(config: RLConfig | AnsweringConfig, *, prefix: str = "") -> None:
    """Raise ModelError where a local folder for the reward model is none, or its tokens are not those of the policy.

    Raises ConfigError where the longest sequence would not fit it.
    """
    path, key = config.reward.model, f"{prefix}reward.model"
    if path is None:
        if config.reward.normalize_model_scores:
            raise ConfigError(f"{prefix}reward.normalize_model_scores needs {key}, whose scores it is about")
        return
    folder = _check_reader(path, config.model.path, key=key, model="the reward model")
    if folder is not None:
        settings = read_json(folder / "config.json")
        require_reward_model(settings, config.reward, path=path, prefix=prefix)
        if config.reward.normalize_model_scores and SCORE_MOMENTS not in settings:
            raise ModelError(
                f"{prefix}reward.normalize_model_scores: {path!r} has no {SCORE_MOMENTS} in its config.json; train it "
                "with `slipstream reward-model`, or set it false"
            )
    check_lengths(config, model_limit(path), prefix=prefix, model="the reward model")


def check_teacher(config: RLConfig | SFTConfig, *, prefix: str = "") -> None:
    """Raise ModelError where a local folder for the teacher is none, or it does not have exactly the policy's tokens.

    Raises ConfigError where the longest sequence would not fit it.
    """
    path, key = _teacher_of(config, prefix)
    if path is None:
        return
    folder = _check_reader(path, config.model.path, key=key, model="the teacher")
    policy = local_folder(config.model.path)
    if folder is not None and policy is not None:
        _check_teacher_tokens(folder, policy, key=key)
    check_lengths(config, model_limit(path), prefix=prefix, model="the teacher")


def _teacher_of(config: RLConfig | SFTConfig, prefix: str) -> tuple[str | None, str]:
    """Path of the teacher, None where there is none, and the key it stands in."""
    if isinstance(config, RLConfig):
        return config.algorithm.teacher, f"{prefix}algorithm.teacher"
    return None if config.teacher is None else config.teacher.path, f"{prefix}teacher.path"


def _check_teacher_tokens(folder: Path, policy: Path, *, key: str) -> None:
    """Raise ModelError where added tokens differ, or the teacher lacks a row for a token. `_check_reader` was there."""
    ours, theirs = _added_tokens(policy), _added_tokens(folder)
    if ours is None or theirs is None:
        return
    if ours != theirs:
        token, number = min(ours.items() ^ theirs.items())
        raise ModelError(
            f"{key}: the tokenizers in {str(folder)!r} and in {str(policy)!r} (model.path) have different added "
            f"tokens, such as {token!r} (id {number}); a teacher must have the same ones: choose one of the same family"
        )
    vocabulary = _vocabulary(policy)
    # A mapping to ids, or a list in their order.
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary or []))
    highest, rows = max([*ours.values(), *ids], default=-1), read_model_facts(folder).vocabulary_size
    if rows <= highest:
        raise ModelError(
            f"{key}: the model in {str(folder)!r} has {rows} rows (vocab_size), and the tokenizer in {str(policy)!r} "
            f"(model.path) a token with the id {highest}; choose a teacher with a row for each token"
        )


def _added_tokens(folder: Path) -> dict[str, int] | None:
    """Tokens that a folder's tokenizer has besides its vocabulary, with their ids; None without a tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    return {token["content"]: token["id"] for token in read_json(file).get("added_tokens") or []}


def _check_reader(path: str, policy_path: str, *, key: str, model: str) -> Path | None:
    """The folder of a local model that is to read the policy's tokens; None for a hub name. Raises ModelError."""
    try:
        folder = _check_folder(path)
    except ModelError as error:
        # The folder does not know which key it stands in.
        raise ModelError(str(error).replace("model.path:", f"{key}:", 1)) from None
    policy = local_folder(policy_path)
    if folder is not None and policy is not None:
        ours, theirs = _vocabulary(policy), _vocabulary(folder)
        if ours and theirs and ours != theirs:
            raise ModelError(
                f"{key}: the tokenizer in {path!r} has other tokens than that of model.path {policy_path!r}: {model} "
                "would read another text; choose a model of the same family"
            )
    return folder


def _vocabulary(folder: Path) -> Any:
    """The tokens of a folder's tokenizer with their ids; None where it has no tokenizer.json."""
    file = folder / "tokenizer.json"
    return read_json(file).get("model", {}).get("vocab") if file.is_file() else None


def _check_folder(path: str) -> Path | None:
    """The folder of a local model, or None for a name on the hub. Raises ModelError where it lacks something."""
    folder = Path(path)
    if folder.is_file():
        hint = f"; convert it with `slipstream import-gguf {path} FOLDER`" if folder.suffix == ".gguf" else ""
        raise ModelError(f"model.path: {path!r} is a file, expected a Hugging Face model folder{hint}")
    if not folder.is_dir():
        if looks_like_path(path):
            raise ModelError(f"model.path: no folder {path!r}; expected a Hugging Face model folder or a hub name")
        return None
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: folder {path!r} has no config.json; expected a Hugging Face model folder")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise ModelError(f"model.path: folder {path!r} has no weights; expected {' or '.join(WEIGHT_PATTERNS)}")
    read_model_facts(folder)
    return folder


def model_limit(path: str) -> int | None:
    """The longest sequence a model takes, from its config.json; None where that is not known here."""
    folder = local_folder(path)
    return None if folder is None else read_model_facts(folder).max_tokens


def check_lengths(
    config: RLConfig | SupervisedConfig | AnsweringConfig,
    limit: int | None,
    *,
    prefix: str = "",
    model: str = "the model",
) -> None:
    """Raise ConfigError where the longest sequence would not fit the `limit` tokens that a model takes."""
    if limit is None:
        return
    if isinstance(config, SupervisedConfig):
        if config.max_tokens > limit:
            raise ConfigError(
                f"{prefix}max_tokens ({config.max_tokens}) exceeds the {limit} tokens {model} takes "
                "(max_position_embeddings)"
            )
        return
    rollout: RolloutConfig = config.rollout
    for key, data in _data_of(config):
        total = data.max_prompt_tokens + rollout.max_response_tokens
        if total > limit:
            raise ConfigError(
                f"{prefix}{key}.max_prompt_tokens ({data.max_prompt_tokens}) + {prefix}rollout.max_response_tokens "
                f"({rollout.max_response_tokens}) = {total} exceeds the {limit} tokens {model} takes "
                "(max_position_embeddings)"
            )


def check_data(config: DataConfig, layout: Layout, *, key: str = "data", needs_label: bool = True) -> None:
    """Raise DataError where a local source is missing, empty, unreadable, or lacks a column. `key`: its section."""
    for name, part in config.parts.items():
        with naming_section(f"{key}.mix.{name}" if name else key):
            rows = _rows_to_check(part)
            if rows:
                name_columns(rows, part, layout, needs_label=needs_label)


def layout_of(config: Section) -> Layout:
    """What the rows of a workflow's data sections are."""
    if isinstance(config, SFTConfig):
        return Layout.RESPONSES
    if isinstance(config, RewardModelConfig):
        return Layout.PAIRS if config.supervision == "pairs" else Layout.LABELLED_STEPS
    if isinstance(config, PreferenceConfig):
        return Layout.PAIRS if config.is_paired else Layout.LABELLED_ANSWERS
    return Layout.PROMPTS


@contextmanager
def naming_section(key: str) -> Iterator[None]:
    """Have errors inside the block name the keys of the data section at `key`; it does not know where it stands."""
    try:
        yield
    except (DataError, ModelError, ConfigError) as error:
        fields = "|".join(DataConfig.model_fields)
        raise type(error)(re.sub(rf"\bdata\.(?=(?:{fields})\b)", f"{key}.", str(error))) from None


def evaluation_key(dataset: str) -> str:
    """Where the section of a held-out set stands in the configuration."""
    return "evaluation.data" if dataset == FIRST_SET else f"evaluation.other_data.{dataset}"


def count_rows(config: DataConfig) -> int | None:
    """Rows of a data section, None where only loading tells: a hub data set, or files too large to read here."""
    counts = [_count_rows_of(part) for part in config.parts.values()]
    return None if None in counts else sum(count or 0 for count in counts)


def _count_rows_of(config: DataConfig) -> int | None:
    if config.source.startswith(REASONING_GYM_PREFIX):
        return config.rows
    path = Path(config.source)
    if not path.exists() or _size_of_data(path) > WHOLE_FILE_BYTES:
        return None
    return len(load_rows(config))


def _check_pipeline(config: PipelineConfig, *, reward: Callable[..., Any] | None) -> None:
    for name, stage in pipeline_stages(config).items():
        prefix = f"{name.partition('/')[0]}."
        check_lengths(stage, config.policy.max_tokens, prefix=prefix)
        if isinstance(stage, RLConfig | SFTConfig):
            _refuse_teacher(stage, prefix=prefix)
        made = frozenset({str(Path(config.output_dir) / "reward_model" / "export")})
        _check_sources(stage, prefix=prefix, reward=reward, made=made)


def _refuse_teacher(stage: SFTConfig | RLConfig, *, prefix: str) -> None:
    """Raise ConfigError for a stage with a teacher: the new policy has a tokenizer that no other model has."""
    path, key = _teacher_of(stage, prefix)
    if path is not None:
        raise ConfigError(
            f"{key}: a pipeline makes a tokenizer of its own, and a teacher must have the same tokens; remove it, or "
            "distil what the pipeline exported with `slipstream sft` or `slipstream rl`"
        )


def _check_sources(
    config: RLConfig | SupervisedConfig | AnsweringConfig,
    *,
    prefix: str,
    reward: Callable[..., Any] | None,
    made: frozenset[str] = frozenset(),
) -> None:
    """`made`: folders of models that an earlier stage of a pipeline will have made."""
    needs_label = not isinstance(config, SupervisedConfig) and config.reward.compares
    for key, data in _data_of(config):
        check_data(data, layout_of(config), key=f"{prefix}{key}", needs_label=needs_label)
    if isinstance(config, RLConfig | AnsweringConfig):
        is_optional = isinstance(config, GenerateConfig) or (isinstance(config, RLConfig) and not config.needs_reward)
        if config.reward.is_given or not is_optional:
            _check_reward(config.reward, reward, prefix=prefix)
        if config.reward.model not in made:
            check_reward_model(config, prefix=prefix)
    if isinstance(config, RLConfig | SFTConfig):
        check_teacher(config, prefix=prefix)
    if isinstance(config, RLConfig):
        _check_algorithm(config.algorithm, prefix=prefix)
        if config.critic.path not in made:
            check_critic(config, prefix=prefix)


def _check_reward(config: RewardConfig, reward: Callable[..., Any] | None, *, prefix: str) -> None:
    if reward is not None or (config.function is None and (config.model is not None or config.urls)):
        return
    if config.function is None:
        raise ConfigError(
            f"{prefix}reward.function: missing; expected 'module:function', 'path/to/file.py:function' or the name of "
            "a built-in rule, or else reward.model, the path of a reward model, or reward.urls, addresses of a service"
        )
    try:
        check_reward_spec(config.function)
    except SlipstreamError as error:
        raise type(error)(f"{prefix}{error}") from None


def _check_algorithm(config: AlgorithmConfig, *, prefix: str) -> None:
    """Raise ConfigError where the algorithm names a function of the user that is not there."""
    functions = {
        "advantage": None if config.advantage in ADVANTAGES else config.advantage,
        "policy_loss": None if config.policy_loss in POLICY_LOSSES else config.policy_loss,
        "shaping.function": config.shaping.function,
    }
    for key, function in functions.items():
        if function is not None:
            check_function(function, key=f"{prefix}algorithm.{key}")


def _data_of(config: Section) -> Iterator[tuple[str, DataConfig]]:
    """The data sections of a workflow by key."""
    if isinstance(config, RLConfig | SupervisedConfig | GenerateConfig):
        yield "data", config.data
    if isinstance(config, SupervisedConfig) and config.evaluation_data is not None:
        yield "evaluation_data", config.evaluation_data
    evaluation = getattr(config, "evaluation", None)
    if isinstance(evaluation, EvaluationConfig):
        yield from ((evaluation_key(name), data) for name, data in evaluation.sets.items())


def _can_only_be_file(source: str) -> bool:
    return looks_like_path(source) or Path(source).suffix.lower() in FILE_TYPES


def _size_of_data(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.suffix.lower() in FILE_TYPES)


def _rows_to_check(config: DataConfig) -> list[Row]:
    """The rows of one source, or a sample of them; none where only loading tells."""
    path = Path(config.source)
    if config.source.startswith(REASONING_GYM_PREFIX):
        _check_task(config)
        return [dict.fromkeys(REASONING_GYM_COLUMNS)]
    if path.exists() and _size_of_data(path) > WHOLE_FILE_BYTES:
        return _sample(path)
    return load_rows(config) if path.exists() or _can_only_be_file(config.source) else []


def _sample(path: Path) -> list[Row]:
    """The first lines of a file too large to be read here. Folders and other types wait for load time."""
    if not path.is_file() or path.suffix.lower() != ".jsonl":
        return []
    with path.open("rb") as stream:
        lines = stream.read(SAMPLE_BYTES).split(b"\n")[:-1]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from None
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _check_task(config: DataConfig) -> None:
    task = config.source.removeprefix(REASONING_GYM_PREFIX)
    known = reasoning_gym_tasks()
    if known and task not in known:
        near = difflib.get_close_matches(task, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"data.source: reasoning-gym has no task {task!r}{hint} ({len(known)} tasks known)")


@lru_cache(maxsize=1)
def reasoning_gym_tasks() -> Sequence[str]:
    """Names of the installed tasks, read from the package's source: importing it takes several seconds.

    Empty where they are not found that way; load time then has the last word.
    """
    package = importlib.util.find_spec("reasoning_gym")
    if package is None or not package.submodule_search_locations:
        raise DataError("data.source: the package reasoning-gym is not installed; pip install reasoning-gym")
    names: set[str] = set()
    for file in Path(next(iter(package.submodule_search_locations))).rglob("*.py"):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "register_dataset(" in text:
            names.update(re.findall(r'register_dataset\(\s*"([^"]+)"', text))
            names.update(re.findall(r'^DATASET_NAME\s*=\s*"([^"]+)"', text, re.MULTILINE))
    return sorted(names)
