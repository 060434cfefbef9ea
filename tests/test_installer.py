"""scripts/install.py: where packages come from, what it says when they cannot be had, and when it stamps.

Nothing is installed: the installer is a stand-in that answers at once.
"""

import http.server
import importlib.util
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "install.py"
PIN = "torch==2.13.0+cpu"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The installation script as a module, pointed at an environment in a temporary folder."""
    specification = importlib.util.spec_from_file_location("installation_script", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "installation_script", module)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.setattr(module, "ENVIRONMENT_PYTHON", tmp_path / ".venv" / "bin" / "python")
    return module


def stand_in(folder: Path, text: str) -> str:
    """An executable shell script."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def pytorch_index() -> Iterator[str]:
    """A server that has a page for torch, as PyTorch's index has."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def test_variables_win_over_the_install_section_which_wins_over_global(script: ModuleType, tmp_path: Path) -> None:
    listing = (
        "global.find-links='/files'\nglobal.cert='/bundle.pem'\ninstall.cert='/other.pem'\nfreeze.cert='/no.pem'\n"
        ":env:.find-links='/variable'"
    )
    pip = stand_in(tmp_path, f"cat <<'END'\n{listing}\nEND")
    assert script.pip_configuration((pip,)) == {"find-links": "/variable", "cert": "/other.pem"}


def test_uv_is_told_every_source_of_pip(script: ModuleType) -> None:
    configuration = {
        "find-links": "/wheels\n/more",
        "index-url": "https://mirror/simple",
        "extra-index-url": "file:///one file:///two",
        "trusted-host": "mirror",
        "no-index": "true",
        "constraint": "/ignored.txt",
    }
    arguments = " ".join(script.uv_source_arguments(configuration))
    assert arguments == (
        "--find-links /wheels --find-links /more --index-url https://mirror/simple --extra-index-url file:///one "
        "--extra-index-url file:///two --allow-insecure-host mirror --no-index --index-strategy unsafe-best-match"
    )


def test_torch_from_the_configured_sources_asks_no_other_index(script: ModuleType, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    installer = script.Installer((stand_in(tmp_path, f'echo "$@" >> {calls}'), "install"), ("--find-links", "/wheels"))
    script.install_torch_cpu(installer, PIN, {})
    assert calls.read_text() == f"install --no-deps --find-links /wheels {PIN}\n"


def test_torch_comes_from_the_pytorch_index_when_the_configured_sources_lack_it(
    script: ModuleType, tmp_path: Path, pytorch_index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setattr(script, "PYTORCH_CPU_INDEX", pytorch_index)
    program = stand_in(tmp_path, f'echo "$@" >> {calls}; test "$2" = --extra-index-url')
    script.install_torch_cpu(script.Installer((program,), ()), PIN, {})
    assert calls.read_text().splitlines() == [f"--no-deps {PIN}", f"--no-deps --extra-index-url {pytorch_index} {PIN}"]


def test_an_unreachable_pytorch_index_is_an_error_that_says_what_was_tried(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(script, "PYTORCH_CPU_INDEX", f"http://127.0.0.1:{port}")
    installer = script.Installer((stand_in(tmp_path, "echo 'ERROR: no such version'; exit 1"),), ())
    with pytest.raises(script.InstallationError) as caught:
        script.install_torch_cpu(installer, PIN, {"find-links": "/wheels"})
    message = str(caught.value)
    assert "find-links /wheels: ERROR: no such version" in message
    assert f"http://127.0.0.1:{port}: cannot be reached" in message and "refused" in message


def test_an_index_that_never_answers_does_not_hang(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "REACHABLE_WITHIN_S", 0.3)
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(script, "PYTORCH_CPU_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(script.InstallationError, match="timed out"):
            script.install_torch_cpu(script.Installer((stand_in(tmp_path, "exit 1"),), ()), PIN, {})
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(("version", "accepted"), [("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu130", False)])
def test_only_the_locked_build_of_torch_is_accepted(script: ModuleType, version: str, accepted: bool) -> None:
    library = script.ENVIRONMENT / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    metadata = library / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    if accepted:
        script.check_torch(PIN)
    else:
        with pytest.raises(script.InstallationError, match="is needed"):
            script.check_torch(PIN)


def test_pip_installs_where_uv_cannot_be_had(script: ModuleType, tmp_path: Path) -> None:
    pip = stand_in(tmp_path, "echo 'ERROR: No matching distribution'; exit 1")
    assert script.choose_installer((pip,), {}, "uv==1.0").command == (pip, "install")


@pytest.mark.parametrize("keeps_none", [True, False])
def test_packages_are_compiled_at_once_where_python_keeps_no_bytecode(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_none: bool
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", keeps_none)
    installer = script.choose_installer((stand_in(tmp_path, "exit 0"),), {}, "uv==1.0")
    assert ("--compile-bytecode" in installer.command) is keeps_none


def test_an_interrupted_installation_leaves_no_stamp(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    stamp = script.ENVIRONMENT / ".installed-cpu"
    stamp.parent.mkdir()
    stamp.touch()
    monkeypatch.setattr(script, "choose_installer", interrupt)
    monkeypatch.setattr(sys, "argv", ["install.py", "cpu"])
    assert script.main() == 130
    assert not stamp.exists()
    assert capfd.readouterr().out == ""
