"""Writes the tables of docs/configuration.md from the schema: the text between its markers, and nothing else.

Run it after a change of `config/schema.py` or of the recipes: `.venv/bin/python scripts/document_configuration.py`. A
test compares the document with what this would write, so the two cannot drift apart.
"""

import re
import sys
from pathlib import Path

from slipstream.config.base import Section
from slipstream.config.generate import GenerateConfig
from slipstream.config.keys import ANY_NAME, Key, config_keys, sections_below
from slipstream.config.pipeline import STAGE_VERBS, PipelineConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "configuration.md"
BEGIN = "<!-- begin: written by scripts/document_configuration.py -->"
END = "<!-- end: written by scripts/document_configuration.py -->"
WORKFLOWS: dict[str, type[Section]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "reward-model": RewardModelConfig,
    "preference": PreferenceConfig,
    "evaluate": EvaluateConfig,
    "generate": GenerateConfig,
    "pipeline": PipelineConfig,
}


def main() -> int:
    """Rewrite the document in place; says whether anything changed."""
    before = DOCUMENT.read_text(encoding="utf-8")
    after = updated(before)
    DOCUMENT.write_text(after, encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)}: {'unchanged' if after == before else 'rewritten'}")
    return 0


def updated(document: str) -> str:
    """The document with the text between the markers replaced. Raises ValueError where the markers are missing."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(document)) != 1:
        raise ValueError(f"{DOCUMENT} must contain the two markers once: {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{generated()}\n\n{END}", document)


def generated() -> str:
    """Recipes, the keys of each workflow's own, then every section once."""
    workflows = [_workflow(name, kind) for name, kind in WORKFLOWS.items()]
    sections = [_section(section, paths) for section, paths in section_places().items()]
    return "\n\n".join([_recipes(), *workflows, *sections])


def section_places() -> dict[type[Section], dict[str, list[str]]]:
    """Every section class with the dotted paths at which it stands, and the workflows that have it there."""
    places: dict[type[Section], dict[str, list[str]]] = {}

    def visit(workflow: str, kind: type[Section], prefix: str) -> None:
        for path_below, section in sections_below(kind).values():
            path = f"{prefix}{path_below}"
            places.setdefault(section, {}).setdefault(path, []).append(workflow)
            visit(workflow, section, f"{path}.")

    for workflow, kind in WORKFLOWS.items():
        visit(workflow, kind, "")
    return places


def _recipes() -> str:
    lines = ["## Recipes by name", "", "| name | what it is |", "|---|---|"]
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"| `{path.stem}` | {_cell(first_line.removeprefix('#').strip())} |")
    return "\n".join(lines)


def _workflow(name: str, kind: type[Section]) -> str:
    own = [key for path, key in config_keys(kind).items() if "." not in path]
    sections = [f"[`{path}`]({_link(section)})" for path, section in sections_below(kind).values()]
    purpose = _docstring(kind).partition(": ")[2]
    lines = [f"## slipstream {name}", "", f"{purpose[0].upper()}{purpose[1:]}", "", *_table(own)]
    if kind is PipelineConfig:
        for stage, verb in STAGE_VERBS.items():
            field = kind.model_fields[stage]
            default = "(required)" if field.is_required() else "null"
            lines.append(f"| `{stage}.*` | {default} | the keys of [slipstream {verb}](#slipstream-{verb}) | "
                         f"{_cell(field.description or '')} |")  # fmt: skip
    return "\n".join([*lines, "", f"Sections: {', '.join(sections)}."])


def _section(section: type[Section], paths: dict[str, list[str]]) -> str:
    places = "; ".join(f"`{path}` in {', '.join(workflows)}" for path, workflows in paths.items())
    keys = config_keys(section)
    own = [keys[name] for name in section.model_fields if name in keys]
    lines = [f"## {_heading(section)}", "", f"{_docstring(section)} Stands at {places}.", "", *_table(own)]
    for name, (path, below) in sections_below(section).items():
        field, heading = section.model_fields[name], _heading(below)
        default, remark = ("null", ", or null") if field.default is None else ("", "")
        if path.endswith(f".{ANY_NAME}"):
            default, remark = "none", f" for each `{ANY_NAME}` of your choice"
        lines.append(f"| `{path}.*` | {default} | the keys of [`{heading}`]({_link(below)}){remark} | "
                     f"{_cell(field.description or '')} |")  # fmt: skip
    return "\n".join(lines)


def _heading(section: type[Section]) -> str:
    """A section has one table, below the first place at which it stands."""
    return next(iter(section_places()[section]))


def _link(section: type[Section]) -> str:
    """The address of a section's table: headings lose their dots and capitals there."""
    return f"#{_heading(section).replace('.', '').lower()}"


def _table(keys: list[Key]) -> list[str]:
    lines = ["| key | default | expected | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = "(required)" if key.required else f"`{_cell(key.default_text)}`"
        lines.append(f"| `{key.path}` | {default} | {_cell(key.expected)} | {_cell(key.description)} |")
    return lines


def _docstring(section: type[Section]) -> str:
    return (section.__doc__ or "").splitlines()[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
