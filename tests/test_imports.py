"""Imports inside slipstream point one way, and what answers at once loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "slipstream"

# A section imports from its own layer and from lower ones. `slipstream.errors` may be imported anywhere.
LAYERS = (
    {"config", "import_path"},
    {"algorithms", "data", "models"},
    {"cluster", "observe", "rewards", "rollout", "training", "weights"},
    {"workflows"},
    {"attempts", "cli", "verbs"},
)
LAYER_OF = {section: depth for depth, sections in enumerate(LAYERS) for section in sections}
SELF_CONTAINED = ("algorithms", "config")
HEAVY = ("datasets", "deepspeed", "matplotlib", "ray", "torch", "transformers", "vllm")


def modules() -> list[Path]:
    """All modules but the package's own `__init__`, whose names are loaded when first used."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def section_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of every import in a module, also those inside functions and under TYPE_CHECKING."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            # `from slipstream import models` imports a section by name.
            names = [f"{prefix}.{alias.name}" for alias in node.names] if prefix == "slipstream" else [prefix]
            found += [(node.lineno, name) for name in names]
    return found


def imported_sections(path: Path) -> list[tuple[int, str]]:
    """Line and section of every import of ours in a module, without `slipstream.errors`."""
    ours = [(line, name.split(".")) for line, name in imports_of(path) if name.split(".")[0] == "slipstream"]
    return [(line, parts[1]) for line, parts in ours if len(parts) > 1 and parts[1] != "errors"]


def test_every_section_has_a_layer() -> None:
    sections = {section_of(path) for path in modules()} - {"errors"}
    assert sections - set(LAYER_OF) == set()


def test_imports_are_absolute() -> None:
    relative = [f"{path}:{line}" for path in modules() for line, name in imports_of(path) if name.startswith(".")]
    assert relative == []


def test_no_section_imports_from_a_layer_above_its_own() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)}:{line} imports slipstream.{imported}"
        for path in modules()
        if section_of(path) != "errors"
        for line, imported in imported_sections(path)
        if LAYER_OF.get(imported, len(LAYERS)) > LAYER_OF[section_of(path)]
    ]
    assert upward == []


@pytest.mark.parametrize("section", SELF_CONTAINED)
def test_algorithms_and_config_import_nothing_of_ours(section: str) -> None:
    foreign = [
        f"{path.relative_to(PACKAGE)}:{line} imports slipstream.{imported}"
        for path in sorted((PACKAGE / section).rglob("*.py"))
        for line, imported in imported_sections(path)
        if imported != section
    ]
    assert foreign == []


@pytest.mark.parametrize("section", ["algorithms", "config", "data"])
def test_the_lower_sections_import_no_engine(section: str) -> None:
    engines = {"deepspeed", "ray", "vllm"}
    found = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in sorted((PACKAGE / section).rglob("*.py"))
        for line, name in imports_of(path)
        if name.split(".")[0] in engines
    ]
    assert found == []


@pytest.mark.parametrize(
    "module", ["slipstream", "slipstream.config.schema", "slipstream.config.loader", "slipstream.cli"]
)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
