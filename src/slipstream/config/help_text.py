"""The configuration keys of a workflow as text for `--help`: read off the schema, grouped by section."""

import textwrap

from slipstream.config.base import Section
from slipstream.config.keys import Key, config_keys, sections_below
from slipstream.config.pipeline import STAGE_VERBS, PipelineConfig

LEFT_COLUMN = 44


def describe_keys(kind: type[Section], *, width: int = 120) -> str:
    """All keys of a workflow with default, meaning and range. A section that occurs again is referred to."""
    lines = ["configuration keys, in the recipe or as --key value (shown with their defaults):"]
    own = [key for path, key in config_keys(kind).items() if "." not in path]
    lines += _key_lines(own, width=width)
    shown: dict[type[Section], str] = {}
    lines += _lines_below(kind, prefix="", shown=shown, width=width)
    if kind is PipelineConfig:
        for name, verb in STAGE_VERBS.items():
            description = kind.model_fields[name].description
            text = f"{name}.*: {description} The keys are those of `slipstream {verb} --help`."
            lines += ["", *_wrapped(text, width)]
    return "\n".join(lines)


def _lines_below(kind: type[Section], *, prefix: str, shown: dict[type[Section], str], width: int) -> list[str]:
    """The sections of a section. `shown` says where each class was shown first, and is added to."""
    lines: list[str] = []
    for name, (path_below, section) in sections_below(kind).items():
        path = f"{prefix}{path_below}"
        if section in shown:
            description = kind.model_fields[name].description
            remark = f" ({description.removesuffix('.')})" if description else ""
            lines += ["", *_wrapped(f"{path}.*: the same keys as {shown[section]}.*{remark}", width)]
        else:
            shown[section] = path
            lines += _section_lines(section, path, width=width)
            lines += _lines_below(section, prefix=f"{path}.", shown=shown, width=width)
    return lines


def _section_lines(section: type[Section], path: str, *, width: int) -> list[str]:
    keys = config_keys(section)
    own = [keys[name] for name in section.model_fields if name in keys]
    heading = f"{path}: {(section.__doc__ or '').splitlines()[0]}"
    return ["", *_wrapped(heading, width), *_key_lines(own, width=width, prefix=f"{path}.")]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width=width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")


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
