"""The configuration schema as a flat list of dotted keys: what each expects, its default and its meaning.

Read off the pydantic classes in `schema`, so that error messages, `--help` and the overrides of the command line can
never say something else than the schema. Leaves out validation itself, which is `loader`'s.
"""

import difflib
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from slipstream.config.base import Section
from slipstream.config.pipeline import PIPELINE_OWNED_KEYS, PIPELINE_STAGES, PipelineConfig

ANY_NAME = "NAME"
"""Stands in a path for a name that the user chooses, as in `evaluation.other_data.NAME.source`."""


@dataclass(frozen=True)
class Key:
    """One configuration key.

    `path` is dotted; `section` the class it is a field of; `expected` the type and range in words; `default` is
    None where `required`, and where the default is null.
    """

    path: str
    section: type[Section]
    expected: str
    description: str
    required: bool
    default: Any
    takes_text: bool
    takes_text_list: bool
    nullable: bool

    @property
    def default_text(self) -> str:
        """The default as one would type it, or '(required)'."""
        if self.required:
            return "(required)"
        if not isinstance(self.default, str):
            return show(self.default)
        # Line breaks are typed as escapes, between double quotes of YAML.
        return shlex.quote(self.default if self.default.isprintable() else json.dumps(self.default))


@lru_cache(maxsize=16)
def config_keys(kind: type[Section]) -> dict[str, Key]:
    """All keys of a workflow by dotted path, in the order of the schema. Sections themselves are not keys.

    Where a field maps names to sections, `NAME` stands for any of them.
    """
    keys: dict[str, Key] = {}
    sections = sections_below(kind)
    for name, field in kind.model_fields.items():
        if kind is PipelineConfig and name in PIPELINE_STAGES:
            for path, key in config_keys(PIPELINE_STAGES[name]).items():
                if path not in PIPELINE_OWNED_KEYS:
                    keys[f"{name}.{path}"] = replace(key, path=f"{name}.{path}")
            continue
        if name not in sections:
            keys[name] = _key(name, kind, field)
            continue
        prefix, section = sections[name]
        for path, key in config_keys(section).items():
            keys[f"{prefix}.{path}"] = replace(key, path=f"{prefix}.{path}")
    return keys


def sections_below(kind: type[Section]) -> dict[str, tuple[str, type[Section]]]:
    """The fields of a section that are sections: by field, the path of their keys and their class.

    The path is the field's name, or `field.NAME` where the field maps names to sections.
    """
    below: dict[str, tuple[str, type[Section]]] = {}
    for name, field in kind.model_fields.items():
        is_mapping = get_origin(field.annotation) is dict
        for candidate in (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                below[name] = (f"{name}.{ANY_NAME}" if is_mapping else name, candidate)
    return below


def keys_around(kind: type[Section], path: str) -> dict[str, Key]:
    """All keys of a workflow, with the names that `path` leads through in place of `NAME`.

    Around `evaluation.other_data.math.source` the keys of any set are those of the set `math`.
    """
    keys = config_keys(kind)
    sections = section_paths(keys)
    parts = path.split(".")
    for depth in range(1, len(parts)):
        general = ".".join([*parts[:depth], ANY_NAME, ""])
        if general[:-1] in sections:
            chosen = ".".join([*parts[: depth + 1], ""])
            found = {known.replace(general, chosen, 1) if known.startswith(general) else known: known for known in keys}
            return {name: replace(keys[known], path=name) for name, known in found.items()}
    return keys


def section_paths(keys: Iterable[str]) -> set[str]:
    """Dotted paths of everything that has keys below it, such as `evaluation` and `evaluation.data`."""
    paths: set[str] = set()
    for path in keys:
        parts = path.split(".")
        paths.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return paths


def keys_below(kind: type[Section], section: str) -> list[str]:
    """Names of the keys and sections directly below a dotted path; '' is the top."""
    depth = section.count(".") + 1 if section else 0
    below = [path for path in keys_around(kind, section) if not section or path.startswith(f"{section}.")]
    return list(dict.fromkeys(path.split(".")[depth] for path in below))


def describe_type(field: FieldInfo) -> str:
    """Type and range of a field in words: 'a whole number of at least 1, or null'."""
    annotation, nullable = _without_null(field.annotation)
    words = _type_words(annotation) + _range_words(field.metadata)
    return f"{words}, or null" if nullable else words


def nearest_keys(path: str, candidates: Iterable[str], *, limit: int = 2) -> list[str]:
    """Keys that somebody who wrote `path` may have meant, best first; empty where nothing is near.

    In this order: the same name in another section (`learning_rate` for `training.learning_rate`), a similar name in
    the same section, a similar dotted path, a similar name in another section.
    """
    known = list(candidates)
    parent, _, name = path.rpartition(".")
    name = name.replace("-", "_").lower()
    path = path.replace("-", "_").lower()
    same_name = sorted((key for key in known if key.rpartition(".")[2] == name), key=lambda key: key.count("."))
    if same_name:
        shallow = [key for key in same_name if key.count(".") == same_name[0].count(".")]
        return shallow[:limit]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return [siblings[close[0]]]
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.85)
    if close:
        return close
    leaves: dict[str, str] = {}
    for key in sorted(known, key=lambda key: key.count(".")):
        leaves.setdefault(key.rpartition(".")[2], key)
    return [leaves[leaf] for leaf in difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)]


def show(value: Any, *, limit: int = 60) -> str:
    """A value as a person would write it in YAML, on one line, cut at `limit` characters."""
    if isinstance(value, str):
        text = repr(value)
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _key(path: str, section: type[Section], field: FieldInfo) -> Key:
    annotation, nullable = _without_null(field.annotation)
    required = field.is_required()
    return Key(
        path=path,
        section=section,
        expected=describe_type(field),
        description=field.description or "",
        required=required,
        default=None if required else field.get_default(call_default_factory=True),
        takes_text=annotation is str,
        takes_text_list=get_origin(annotation) is list and get_args(annotation) == (str,),
        nullable=nullable,
    )


def _without_null(annotation: Any) -> tuple[Any, bool]:
    arguments = get_args(annotation)
    if NoneType not in arguments:
        return annotation, False
    others = [argument for argument in arguments if argument is not NoneType]
    return (others[0] if len(others) == 1 else annotation), True


def _type_words(annotation: Any) -> str:
    simple = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if annotation in simple:
        return simple[annotation]
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if origin is list:
        plural = {int: "whole numbers", float: "numbers", str: "texts"}
        return f"a list of {plural.get(get_args(annotation)[0], 'values')}"
    if origin is dict:
        return "a mapping"
    return "a section"


def _range_words(metadata: Sequence[Any]) -> str:
    limits: dict[str, Any] = {}
    for constraint in metadata:
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length"):
            if getattr(constraint, name, None) is not None:
                limits[name] = getattr(constraint, name)
    if "min_length" in limits and limits.get("min_length") == limits.get("max_length"):
        return f" with exactly {limits['min_length']} entries"
    if "ge" in limits and limits["ge"] == limits.get("le"):
        return f" equal to {limits['ge']}"
    phrases = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    words = " and ".join(f"{phrase} {limits[name]}" for name, phrase in phrases.items() if name in limits)
    return f" of {words}" if words.startswith("at ") else f" {words}" if words else ""
