"""The configuration keys of a workflow as text for `--help`: read off the schema, grouped by section."""

import textwrap

from slipstream.config.base import Section
from slipstream.config.keys import PIPELINE_STAGES, Key, config_keys, section_of
from slipstream.config.schema import PipelineConfig

LEFT_COLUMN = 44


def describe_keys(kind: type[Section], *, width: int = 120) -> str:
    """All keys of a workflow with default, meaning and range. A section that occurs again is referred to."""
    lines = ["configuration keys, in the recipe or as --key value (shown with their defaults):"]
    own = [key for path, key in config_keys(kind).items() if "." not in path]
    lines += _key_lines(own, width=width)
    shown: dict[type[Section], str] = {}
    for name, field in kind.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            lines += _section_lines(section, name, shown=shown, width=width)
    if kind is PipelineConfig:
        for name in PIPELINE_STAGES:
            description = kind.model_fields[name].description
            lines += ["", f"{name}.*: {description} The keys are those of `slipstream {name} --help`."]
    return "\n".join(lines)


def _section_lines(section: type[Section], path: str, *, shown: dict[type[Section], str], width: int) -> list[str]:
    if section in shown:
        return ["", f"{path}.*: the same keys as {shown[section]}.*"]
    shown[section] = path
    lines = ["", f"{path}: {(section.__doc__ or '').splitlines()[0]}"]
    keys = config_keys(section)
    lines += _key_lines([keys[name] for name in section.model_fields if name in keys], width=width, prefix=f"{path}.")
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            lines += _section_lines(below, f"{path}.{name}", shown=shown, width=width)
    return lines


def _key_lines(keys: list[Key], *, width: int, prefix: str = "") -> list[str]:
    lines: list[str] = []
    for key in keys:
        left = f"  --{prefix}{key.path} {key.default_text}"
        meaning = f"{key.description} [{key.expected}]"
        wrapped = textwrap.wrap(meaning, width=max(30, width - LEFT_COLUMN))
        if len(left) < LEFT_COLUMN:
            left = f"{left:<{LEFT_COLUMN}}{wrapped.pop(0)}"
        lines += [left, *(" " * LEFT_COLUMN + line for line in wrapped)]
    return lines
