"""The doctor finds out, bounds every wait, and says how to get what is missing."""

import io
import json
import time

import pytest
from rich.console import Console

from slipstream.workflows import doctor
from slipstream.workflows.doctor import Diagnosis, EngineFinding, examine, print_diagnosis, probe
from slipstream.workflows.dry_run import Machine

HARDWARE = {"device": "cpu", "dtype": "float32", "collective_backend": "gloo", "weight_channel": "shared_memory"}


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that import at once, and a hub that does not answer."""
    monkeypatch.setattr(doctor, "ENGINES", {"json": ("import json", ("pytest",))})
    monkeypatch.setattr(doctor, "HARDWARE_STATEMENT", f"print({json.dumps(json.dumps(HARDWARE))})")
    monkeypatch.setattr(doctor, "_reach_hub", lambda: False)


def shown(diagnosis: Diagnosis) -> str:
    stream = io.StringIO()
    print_diagnosis(diagnosis, Console(file=stream, width=160))
    return stream.getvalue()


def test_a_probe_tells_a_good_import_from_a_missing_one_and_from_a_crash() -> None:
    assert probe("print('here')", deadline_s=30) == doctor.ProbeResult("here\n", None)
    assert probe("import not_there", deadline_s=30).problem == "ModuleNotFoundError: No module named 'not_there'"
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert probe(crash, deadline_s=30).problem == "the process was ended by SIGSEGV"


def test_a_probe_that_hangs_is_killed_with_all_it_started() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started = time.monotonic()
    assert probe(child, deadline_s=1.0).problem == "no answer within 1 s"
    assert time.monotonic() - started < 20


def test_a_sound_machine_is_usable(light: None) -> None:
    diagnosis = examine(deadline_s=30)
    assert diagnosis.usable
    assert "Everything the main path needs is here." in shown(diagnosis)
    record = json.loads(json.dumps(diagnosis.as_json(), allow_nan=False))
    assert record["usable"] is True
    assert record["hardware"]["device"] == "cpu"


def test_a_missing_engine_makes_it_unusable_and_says_how_to_get_it(
    light: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {"ghost": ("import ghost_engine", ("ghost-engine",)), "broken": ("raise OSError('bad')", ("pytest",))}
    monkeypatch.setattr(doctor, "ENGINES", engines)
    diagnosis = examine(deadline_s=30)
    text = shown(diagnosis)
    assert not diagnosis.usable
    assert "not installed: ghost." in text and "make install" in text and "pip install 'slipstream[" in text
    assert "installed but broken: broken." in text and "OSError: bad" in text
    assert "Training cannot run here yet." in text


def test_hardware_that_cannot_be_examined_makes_it_unusable(light: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HARDWARE_STATEMENT", "raise ImportError('no torch')")
    diagnosis = examine(deadline_s=30)
    assert diagnosis.hardware is None and not diagnosis.usable


def test_a_token_is_only_said_to_be_there(light: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    diagnosis = examine(deadline_s=30)
    assert diagnosis.hub_token is True
    assert "hf_very_secret" not in shown(diagnosis) + json.dumps(diagnosis.as_json())


def test_little_shared_memory_and_disk_are_pointed_out() -> None:
    diagnosis = Diagnosis(
        system="Linux",
        python="3.11.0",
        machine=Machine(cpus=1, gpus=0, memory_bytes=1 << 30, native_bfloat16=False),
        gpus=[],
        memory_available_bytes=1 << 29,
        shared_memory_bytes=1 << 26,
        shared_memory_free_bytes=1 << 26,
        disk_free_bytes=1 << 20,
        hub="https://hub",
        hub_reachable=False,
        hub_token=False,
        isolation="namespaces",
        engines=[EngineFinding("torch", "1", None)],
        hardware=HARDWARE,
        advice=doctor._advice([], on_gpu=False, shared_free=1 << 26, disk_free=1 << 20),
    )
    text = shown(diagnosis)
    assert "--shm-size" in text
    assert "0.0 GiB of disk are free" in text
    assert "not reachable" in text
    assert "isolation of programs" in text


@pytest.mark.slow
def test_every_engine_of_the_main_path_imports_here() -> None:
    diagnosis = examine()
    assert {engine.name: engine.problem for engine in diagnosis.engines} == dict.fromkeys(doctor.ENGINES)
    assert diagnosis.hardware is not None
