"""Makes .venv and installs one locked set of packages, and slipstream itself, into it: `install.py cpu` or `gpu`.

Run by `make install` with a bare Python 3.11 or 3.12: standard library only. Nothing is resolved here; the versions are
those of requirements/SET.txt. Packages come from wherever pip on this machine is configured to find them. uv installs
them, told what pip is told; where uv itself cannot be had, pip does, more slowly. torch's CPU build is not on PyPI: if
the configured sources lack it, it is taken from PyTorch's own CPU index.

The environment is always built anew, and a stamp is written last, so that half an installation never looks like one.
All output goes to standard error: standard output belongs to the command that needed the environment.
"""

import argparse
import ast
import http.client
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
ENVIRONMENT_PYTHON = ENVIRONMENT / "bin" / "python"
SUPPORTED_PYTHONS = ((3, 11), (3, 12))
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACHABLE_WITHIN_S = 10.0


class InstallationError(Exception):
    """The installation cannot go on; the message says what was found and what to do."""


@dataclass(frozen=True)
class Installer:
    """A program that installs packages into the environment: uv, or pip where uv cannot be had.

    Attributes:
        command: the program and its arguments, up to the point where packages are named.
        source_arguments: where packages come from, besides what the program finds out by itself.
    """

    command: tuple[str, ...]
    source_arguments: tuple[str, ...]

    def install(self, *arguments: str, quietly: bool = False) -> subprocess.CompletedProcess[str]:
        """Installs without dependencies. `quietly` keeps the output in the result, in place of showing it."""
        command = [*self.command, "--no-deps", *self.source_arguments, *arguments]
        return subprocess.run(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE if quietly else sys.stderr,
            stderr=subprocess.STDOUT if quietly else None,
        )


def say(text: str) -> None:
    print(f"install: {text}", file=sys.stderr, flush=True)


def check_machine() -> None:
    """Raises InstallationError where the locks don't hold or packages without a wheel cannot be built."""
    if sys.version_info[:2] not in SUPPORTED_PYTHONS:
        raise InstallationError(f"Python {platform.python_version()} runs this; 3.11 or 3.12 is needed (PYTHON=...).")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise InstallationError(f"the locked packages are for x86-64 Linux; this is {platform.platform()}.")
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise InstallationError("no C compiler is found: install gcc (a few packages come as source only).")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise InstallationError("Python.h is not found: install Python's headers (python3-dev or the like).")


def create_environment() -> tuple[str, ...]:
    """Makes an empty .venv in place of what is there. Returns the pip command that installs into it."""
    if ENVIRONMENT.is_symlink():
        raise InstallationError(f"{ENVIRONMENT} is a symbolic link; remove it, then try again.")
    if ENVIRONMENT.exists():
        say("removing the unfinished or outdated .venv")
        shutil.rmtree(ENVIRONMENT)
    say(f"making .venv with Python {platform.python_version()}")
    venv.create(ENVIRONMENT, with_pip=False, symlinks=True)
    # Some distributions package ensurepip apart; their own pip can install into the environment from outside.
    bundled = subprocess.run([ENVIRONMENT_PYTHON, "-m", "ensurepip", "--default-pip"], capture_output=True, text=True)
    if bundled.returncode == 0:
        return (str(ENVIRONMENT_PYTHON), "-m", "pip")
    outside = (sys.executable, "-m", "pip", "--python", str(ENVIRONMENT_PYTHON))
    if subprocess.run([*outside, "--version"], capture_output=True).returncode == 0:
        return outside
    raise InstallationError(f"{sys.executable} has neither ensurepip nor pip: install pip (python3-pip).")


def pip_configuration(pip: tuple[str, ...]) -> dict[str, str]:
    """What pip is configured with for installing, from all its files and variables, the strongest winning."""
    listing = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
    if listing.returncode != 0:
        raise InstallationError(f"pip cannot read its configuration:\n{listing.stderr.strip()}")
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.stdout.splitlines():
        key, separator, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if separator and section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    return sections["global"] | sections["install"] | sections[":env:"]


def uv_source_arguments(configuration: dict[str, str]) -> tuple[str, ...]:
    """pip's sources as arguments of uv, which reads none of pip's configuration."""
    arguments: list[str] = []
    for name in ("find-links", "index-url", "extra-index-url"):
        for location in configuration.get(name, "").split():
            arguments += [f"--{name}", location]
    for host in configuration.get("trusted-host", "").split():
        arguments += ["--allow-insecure-host", host]
    if configuration.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        arguments.append("--no-index")
    # As pip does: any index may serve any package. Every version is pinned, so no index can slip in a newer one.
    return (*arguments, "--index-strategy", "unsafe-best-match")


def export_connection_settings(configuration: dict[str, str]) -> None:
    """Makes pip's certificates and proxy the ones of uv and of this program, unless the variables are set already."""
    if "cert" in configuration:
        os.environ.setdefault("SSL_CERT_FILE", configuration["cert"])
    if "proxy" in configuration:
        os.environ.setdefault("HTTPS_PROXY", configuration["proxy"])
        os.environ.setdefault("HTTP_PROXY", configuration["proxy"])


def choose_installer(pip: tuple[str, ...], configuration: dict[str, str], uv_pin: str) -> Installer:
    """uv at the locked version if pip can install it, else pip."""
    say(f"installing {uv_pin}, which installs the rest")
    bootstrap = Installer(command=(*pip, "install"), source_arguments=())
    attempt = bootstrap.install("--quiet", uv_pin, quietly=True)
    if attempt.returncode == 0:
        uv = str(ENVIRONMENT / "bin" / "uv")
        command: tuple[str, ...] = (uv, "pip", "install", "--python", str(ENVIRONMENT_PYTHON))
        # Where Python is told to keep no bytecode (PYTHONDONTWRITEBYTECODE), each of a run's many processes would
        # compile what it imports anew: seconds of every start. pip compiles by itself, uv only when it is told to.
        if sys.dont_write_bytecode:
            command += ("--compile-bytecode",)
        return Installer(command, uv_source_arguments(configuration))
    say(f"{uv_pin} cannot be had ({last_line(attempt.stdout)}); using pip, which takes longer")
    return bootstrap


def install_torch_cpu(installer: Installer, pin: str, configuration: dict[str, str]) -> None:
    """Installs torch's CPU build from the configured sources, else from PyTorch's CPU index.

    Raises:
        InstallationError: neither has it; names both and why.
    """
    say(f"installing {pin} from the sources that pip is configured with")
    attempt = installer.install(pin, quietly=True)
    if attempt.returncode == 0:
        return
    configured = [f"{name} {configuration[name]}" for name in ("find-links", "index-url", "extra-index-url")
                  if name in configuration]  # fmt: skip
    tried = f"{', '.join(configured) or 'PyPI'}: {explanation(attempt.stdout)}"
    say(f"not there; trying {PYTORCH_CPU_INDEX}")
    try:
        urllib.request.urlopen(f"{PYTORCH_CPU_INDEX}/torch/", timeout=REACHABLE_WITHIN_S).close()
    except (OSError, http.client.HTTPException) as error:
        found = f"cannot be reached ({getattr(error, 'reason', error)})"
    else:
        if installer.install("--extra-index-url", PYTORCH_CPU_INDEX, pin).returncode == 0:
            return
        found = "see its message above"
    raise InstallationError(
        f"{pin} for Python {platform.python_version()} is nowhere to be had. Tried:\n"
        f"  - what pip is configured with, {tried}\n"
        f"  - PyTorch's CPU index, {PYTORCH_CPU_INDEX}: {found}\n"
        "Connect to that index, or put the wheel in a folder and name the folder to pip\n"
        "(pip config set global.find-links FOLDER), then try again."
    )


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def explanation(text: str) -> str:
    """The line of an installer's output that says why a package was not found, else its last line."""
    reasons = [line.strip() for line in text.splitlines() if "Because" in line or "ERROR" in line]
    return reasons[0].strip() if reasons else last_line(text)


def pins(set_name: str) -> list[str]:
    """The requirements of a lock, such as 'numpy==2.3.5', with their markers."""
    lines = (ROOT / "requirements" / f"{set_name}.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def pin_of(name: str, requirements: list[str]) -> str:
    """The one requirement of that package, without its marker."""
    return next(pin.partition(";")[0].strip() for pin in requirements if pin.startswith(f"{name}=="))


def install_packages(installer: Installer, requirements: list[str]) -> None:
    """Installs what the lock names, then slipstream itself from this folder, editable."""
    say(f"installing {len(requirements)} packages at their locked versions")
    listed = ENVIRONMENT / "requirements.txt"
    listed.write_text("\n".join(requirements) + "\n")
    if installer.install("--requirement", str(listed)).returncode != 0:
        raise InstallationError("the packages could not be installed; the reason is above.")
    # The build backend is among the locked packages.
    if installer.install("--no-build-isolation", "--editable", ".").returncode != 0:
        raise InstallationError("slipstream itself could not be installed; the reason is above.")


def check_torch(pin: str) -> None:
    """Raises InstallationError if the torch in the environment is not exactly the locked build."""
    library = ENVIRONMENT / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    distributions = importlib.metadata.distributions(path=[str(library)])
    found = [distribution.version for distribution in distributions if distribution.metadata["Name"] == "torch"]
    if found != [pin.removeprefix("torch==")]:
        raise InstallationError(f"the environment has torch {found}; {pin} is needed.")


def install(set_name: str) -> None:
    """Builds the environment from nothing and stamps it."""
    check_machine()
    requirements = pins(set_name)
    torch_pin = pin_of("torch", requirements)
    pip = create_environment()
    configuration = pip_configuration(pip)
    export_connection_settings(configuration)
    installer = choose_installer(pip, configuration, pin_of("uv", requirements))
    if set_name == "cpu":
        install_torch_cpu(installer, torch_pin, configuration)
        requirements.remove(torch_pin)
    install_packages(installer, requirements)
    check_torch(torch_pin)
    (ENVIRONMENT / f".installed-{set_name}").touch()
    say("done")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv and install a locked set of packages into it.")
    parser.add_argument("set", choices=("cpu", "gpu"), help="which of requirements/*.txt")
    try:
        install(parser.parse_args().set)
    except InstallationError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts anew")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
