"""From a YAML file and `--section.key value` overrides to a checked configuration, or one clear line per mistake.

First thing the command line does with its arguments. YAML is version 1.2 (`1e-4` is a number, `on` is text), a key
given twice is an error. Leaves out what needs the file system or the model; that is `checks`.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.representer import SafeRepresenter

from slipstream.config.base import Section
from slipstream.config.keys import (
    ANY_NAME,
    Key,
    config_keys,
    keys_around,
    keys_below,
    nearest_keys,
    section_paths,
    show,
)
from slipstream.config.pipeline import PIPELINE_STAGES, PipelineConfig
from slipstream.config.schema import RLConfig
from slipstream.errors import ConfigError

AnySection = TypeVar("AnySection", bound=Section)

SHORTHANDS = {"algorithm": "preset", "rl.algorithm": "preset"}
"""Sections that may be given as one word, which is the value of this key: `algorithm: ppo`."""


class _Constructor(SafeConstructor):
    """YAML 1.2 has no dates: `2024-01-01` is text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    """Text with characters that do not print (line ends of all kinds among them) goes into double quotes, escaped."""

    def represent_text(self, text: str) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Representer.add_representer(str, _Representer.represent_text)


class Override(NamedTuple):
    """One `--key value` of the command line; `text` is the value as it was typed."""

    path: str
    text: str


def load_config(kind: type[AnySection], path: str | Path | None, overrides: Sequence[str]) -> AnySection:
    """Read a recipe, apply overrides (what is left of argv: `--section.key value` or `--section.key=value`), validate.

    `path` None starts from nothing. Raises ConfigError with one line per problem.
    """
    values = {} if path is None else _read_recipe(kind, Path(path))
    for section, key in SHORTHANDS.items():
        if isinstance(word := _get(values, section), str):
            _set(values, section, {key: word})
    for override in parse_overrides(kind, overrides):
        _set(values, override.path, _override_value(kind, override))
    return validate_config(kind, values)


def validate_config(kind: type[AnySection], mapping: Mapping[str, Any]) -> AnySection:
    """Check a mapping against the schema. Raises ConfigError with one line per problem."""
    config = _validate(kind, mapping, prefix="")
    if isinstance(config, PipelineConfig):
        pipeline_stages(config)
    return config


def pipeline_stages(config: PipelineConfig) -> dict[str, Any]:
    """The complete configurations of a pipeline's stages by name, in their order; of each comparison, one.

    Each stage gets the model that an earlier one exports. Raises ConfigError whose keys start with the stage's name.
    """
    folder = Path(config.output_dir)
    start = folder / "sft" / "export"
    stages: dict[str, Any] = {}
    for name in config.stage_names:
        if name == "comparison":
            for other in config.compared:
                stages[f"{name}/{other}"] = _stage(config, name, folder / name / other, folder / other / "export")
            continue
        stages[name] = _stage(config, name, folder / name, folder / "policy" if name == "sft" else start)
    return stages


def _stage(config: PipelineConfig, name: str, output_dir: Path, model_path: Path) -> Section:
    """The configuration of one stage, with what the pipeline fills in."""
    given: dict[str, Any] = json.loads(json.dumps(getattr(config, name)))
    filled = {"seed": config.seed, "output_dir": str(output_dir), "model.path": str(model_path)}
    if name == "rl" and config.reward_model is not None:
        filled["reward.model"] = str(Path(config.output_dir) / "reward_model" / "export")
    for key in filled:
        if _get(given, key) is not None:
            what = f"set by the pipeline's own {key}" if key in ("seed", "output_dir") else "made by an earlier stage"
            raise ConfigError(f"{name}.{key}: a stage's {key} is {what}; remove it from {name}")
    for key, value in filled.items():
        _set(given, key, value, prefix=f"{name}.")
    stage = _validate(PIPELINE_STAGES[name], given, prefix=f"{name}.")
    if isinstance(stage, RLConfig) and stage.has_critic and stage.critic.path is None and "reward.model" in filled:
        _set(given, "critic.path", filled["reward.model"], prefix=f"{name}.")
        stage = _validate(RLConfig, given, prefix=f"{name}.")
    return stage


def dump_config(config: Section) -> str:
    """The configuration with every default filled in, as YAML that `load_config` reads back to an equal one."""
    yaml = _yaml()
    stream = io.StringIO()
    yaml.dump(config.model_dump(), stream)
    return stream.getvalue()


def resolve_recipe(name_or_path: str) -> Path:
    """The file of a recipe: a path that exists, or the bare name of one that comes with Slipstream.

    Raises ConfigError that lists the shipped recipes.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    available = _shipped_recipes()
    shipped = available.get(path.name.removesuffix(".yaml")) if path.parent == Path(".") else None
    if shipped is not None:
        return shipped
    if path.is_dir():
        raise ConfigError(f"recipe {name_or_path!r} is a folder; expected a YAML file")
    near = nearest_keys(path.stem, available)
    hint = f"; did you mean {near[0]}?" if near else ""
    names = ", ".join(available) or "none"
    raise ConfigError(f"no recipe {name_or_path!r}: no such file, and the recipes shipped are {names}{hint}")


def parse_overrides(kind: type[Section], arguments: Sequence[str]) -> list[Override]:
    """Split `--key value` and `--key=value`. Raises ConfigError for anything else, naming it."""
    overrides: list[Override] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or argument == "--":
            raise ConfigError(f"unexpected argument {argument!r}; expected --section.key value")
        path, equals, text = argument[2:].partition("=")
        if not all(path.split(".")):
            raise ConfigError(f"{argument!r} is not a key; expected --section.key value")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(_missing_value(kind, path))
            text = waiting.pop(0)
        if path in SHORTHANDS and path in section_paths(config_keys(kind)):
            path = f"{path}.{SHORTHANDS[path]}"
        overrides.append(Override(path, text))
    return overrides


def _missing_value(kind: type[Section], path: str) -> str:
    keys = keys_around(kind, path)
    if path in keys:
        return f"--{path} has no value; expected {keys[path].expected} (a value starting with '--' needs --{path}=...)"
    if path in section_paths(keys) or path.startswith("-"):
        return f"--{path} has no value; expected --section.key value"
    return f"--{path} has no value and is not a key{_hint(kind, path)}"


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 1 << 20
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


def _read_recipe(kind: type[Section], path: Path) -> dict[str, Any]:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); expected a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    values, texts = _parse_yaml(content, where=str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values, found {show(values)}")
    _restore_texts(kind, values, texts)
    return values


def _parse_yaml(text: str, *, where: str) -> tuple[Any, Any]:
    """YAML as values, and with every scalar as its text. Raises ConfigError with line and column."""
    try:
        values = _yaml().load(text)
        json.dumps(values)
        texts = YAML(typ="base", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = " ".join((error.problem or error.context or "not valid YAML").split())
        raise ConfigError(f"{where}{place}: {problem}") from None
    except YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected plain text, numbers, lists and mappings: {error}") from None
    return values, texts


def _override_value(kind: type[Section], override: Override) -> Any:
    """The value of an override. Where the key takes text, what was typed is the value, whatever it looks like."""
    key = keys_around(kind, override.path).get(override.path)
    typed = override.text
    if key is not None and key.takes_text:
        if key.nullable and typed == "null":
            return None
        is_quoted = len(typed) >= 2 and typed[0] == typed[-1] and typed[0] in "'\""
        return _parse_yaml(typed, where=f"--{override.path} {show(typed)}")[0] if is_quoted else typed
    value, text = _parse_yaml(typed, where=f"--{override.path} {show(typed)}")
    values: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    _set(values, override.path, value)
    _set(texts, override.path, text)
    _restore_texts(kind, values, texts)
    return _get(values, override.path)


def _get(mapping: Mapping[str, Any], path: str) -> Any:
    value: Any = mapping
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _set(mapping: dict[str, Any], path: str, value: Any, *, prefix: str = "") -> None:
    """Put a value at a dotted path, making the sections on the way. A section that is null becomes one."""
    *parents, name = path.split(".")
    for depth, part in enumerate(parents, start=1):
        below = mapping.get(part)
        if below is None:
            below = mapping[part] = {}
        if not isinstance(below, dict):
            section = ".".join(parents[:depth])
            raise ConfigError(f"{prefix}{path}: {prefix}{section} holds {show(below)}, which has no keys below it")
        mapping = below
    mapping[name] = value


def _restore_texts(kind: type[Section], values: dict[str, Any], texts: Mapping[str, Any]) -> None:
    """Where a key takes text and YAML made a number or a truth value of it (`prompt_key: 5`), go back to the text."""
    for path, key in _keys_in(kind, values):
        value, text = _get(values, path), _get(texts, path)
        if key.takes_text and isinstance(value, bool | int | float) and isinstance(text, str):
            _set(values, path, text)
        elif key.takes_text_list and isinstance(value, list) and isinstance(text, list) and len(value) == len(text):
            restored = [
                raw if isinstance(item, bool | int | float) else item for item, raw in zip(value, text, strict=True)
            ]
            _set(values, path, restored)


def _keys_in(kind: type[Section], values: Mapping[str, Any]) -> Iterator[tuple[str, Key]]:
    """All keys by path; those of sections that the user names, once for each name in `values`."""
    for path, key in config_keys(kind).items():
        mapping, is_named, rest = path.partition(f".{ANY_NAME}.")
        if not is_named:
            yield path, key
        elif isinstance(sections := _get(values, mapping), Mapping):
            yield from ((f"{mapping}.{name}.{rest}", key) for name in sections)


def _validate(kind: type[AnySection], mapping: Mapping[str, Any], *, prefix: str) -> AnySection:
    try:
        return kind.model_validate(mapping)
    except ValidationError as error:
        details = error.errors(include_url=False)
    unknown = [item for item in details if item["type"] in ("extra_forbidden", "invalid_key")]
    lines = [_unknown_key(kind, item, prefix=prefix) for item in unknown]
    meant = {key for item in unknown for key in _nearest(kind, _dotted(item["loc"]))}
    for item in details:
        if item in unknown:
            continue
        if item["type"] == "missing":
            # A key written with a typing mistake is unknown and missing at the same time: one line is enough.
            required = _missing_keys(kind, item["loc"])
            missing = [
                key
                for key in required
                if not any(key.path == path or key.path.startswith(f"{path}.") for path in meant)
            ]
            lines += [f"{prefix}{key.path}: missing; expected {key.expected} ({key.description})" for key in missing]
            section = _dotted(item["loc"])
            if not required and not any(f"{path}.".startswith(f"{section}.") for path in meant):
                lines.append(f"{prefix}{section}: missing; expected {_expected_keys(kind, section)}")
        else:
            lines.append(_invalid_value(kind, item, prefix=prefix))
    raise ConfigError("\n".join(lines))


def _unknown_key(kind: type[Section], item: ErrorDetails, *, prefix: str) -> str:
    path = _dotted(item["loc"])
    return f"{prefix}{path}: unknown key (value {show(item['input'])}){_hint(kind, path, prefix=prefix)}"


def _hint(kind: type[Section], path: str, *, prefix: str = "") -> str:
    near = _nearest(kind, path)
    if near:
        return "; did you mean " + " or ".join(prefix + key for key in near) + "?"
    parent = path.rpartition(".")[0]
    return f"; keys {f'of {prefix}{parent}' if parent else 'here'} are {', '.join(keys_below(kind, parent))}"


def _nearest(kind: type[Section], path: str) -> list[str]:
    keys = keys_around(kind, path)
    # The section that the unknown key stands in is no answer, nor is a name that the user may choose.
    sections = [
        section
        for section in section_paths(keys)
        if not path.startswith(f"{section}.") and not section.endswith(f".{ANY_NAME}")
    ]
    return nearest_keys(path, [*keys, *sorted(sections)])


def _missing_keys(kind: type[Section], location: tuple[int | str, ...]) -> list[Key]:
    """The required keys that are missing with a key or a whole section; names that nobody chose lack nothing."""
    path = _dotted(location)
    return [
        key
        for key in keys_around(kind, path).values()
        if key.required
        and (key.path == path or key.path.startswith(f"{path}."))
        and f".{ANY_NAME}." not in key.path.removeprefix(path)
    ]


def _invalid_value(kind: type[Section], item: ErrorDetails, *, prefix: str) -> str:
    path = _dotted(item["loc"])
    if item["type"] == "value_error":
        text = str(item["ctx"]["error"])
        if not path:
            return _prefixed(text, prefix)
        # A section's own check names the section's keys without the way to them.
        names_key = text.split(maxsplit=1)[0] in keys_below(kind, path)
        return f"{prefix}{path}.{text}" if names_key else f"{prefix}{path}: {text}"
    bare = path.partition("[")[0]
    key = keys_around(kind, bare).get(bare)
    expected = _expected_keys(kind, bare) if key is None else key.expected
    where = f"{prefix}{path}: " if path else ""
    return f"{where}found {show(item['input'])}, expected {expected}"


def _expected_keys(kind: type[Section], section: str) -> str:
    below = keys_below(kind, section)
    if below == [ANY_NAME]:
        return f"names, each with the keys {', '.join(keys_below(kind, f'{section}.{ANY_NAME}'))}"
    return f"the keys {', '.join(below)}"


def _prefixed(text: str, prefix: str) -> str:
    return f"{prefix.rstrip('.')}: {text}" if prefix else text


def _dotted(location: tuple[int | str, ...]) -> str:
    """pydantic's location as a dotted key: ('training', 'betas', 0) is 'training.betas[0]'."""
    path = ""
    for part in location:
        if part == "[key]":
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _shipped_recipes() -> dict[str, Path]:
    """Recipes by name: package data of an installed Slipstream, or the repository's folder of an editable one."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}
