"""What a run ran on: `environment.json`, to reproduce it or to explain a difference.

Versions, machine, source revision and command line. Environment variables are never recorded, because they hold keys;
arguments and addresses that look like secrets are blanked.
"""

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

GIT_TIMEOUT_S = 5.0
# `--hub.token X`, `--api-key=X`; not `--data.prompt_key` or `--max_prompt_tokens`.
SECRET_OPTION = re.compile(r"^--?(?:.*[._-])?(?:token|secret|password|api[_-]?key)$", re.IGNORECASE)
URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
BLANK = "***"


def describe_environment() -> dict[str, Any]:
    """One start of a run, as JSON: time, command, versions, machine, git revision of the working folder."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact(sys.argv),
        "working_folder": os.getcwd(),
        "process": os.getpid(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": _processor_name(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "git": _git_revision(Path.cwd()),
        "packages": _package_versions(),
    }


def redact(arguments: list[str]) -> list[str]:
    """Command line arguments with the values of secret-looking options, and credentials in URLs, blanked."""
    shown: list[str] = []
    secret_follows = False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if secret_follows and not argument.startswith("--"):
            shown.append(BLANK)
        elif equals and SECRET_OPTION.match(option):
            shown.append(f"{option}={BLANK}")
        else:
            shown.append(URL_CREDENTIALS.sub(f"{BLANK}@", argument))
        secret_follows = not equals and SECRET_OPTION.match(argument) is not None
    return shown


def _package_versions() -> dict[str, str]:
    versions = {distribution.name: distribution.version for distribution in metadata.distributions()}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _processor_name() -> str:
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8", errors="replace") if information.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


def _git_revision(folder: Path) -> dict[str, Any] | None:
    """Commit of the working tree that `folder` is in and whether files differ from it; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed_files": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # No git, no repository, or one too slow to ask: a run does not depend on it.
    return answer.stdout.strip()
