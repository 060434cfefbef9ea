"""What tells models apart: their configuration and weights, wherever they lie."""

import shutil
from pathlib import Path

import pytest

from slipstream.models.fingerprint import model_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
    (model / "README.md").write_text("about the model")
    return model


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert model_fingerprint(str(tmp_path / "copy")) == model_fingerprint(str(folder))


def test_what_is_no_part_of_the_model_does_not_count(folder: Path) -> None:
    before = model_fingerprint(str(folder))
    (folder / "README.md").write_text("more about the model")
    assert model_fingerprint(str(folder)) == before


@pytest.mark.parametrize("place", [0, 1_700_000, -1])
def test_other_weights_of_the_same_size_are_another_model(folder: Path, place: int) -> None:
    before = model_fingerprint(str(folder))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    start = place % len(weights)
    # Training moves all weights; here a tenth of them is enough.
    region = slice(max(0, start - 500_000), start + 1)
    weights[region] = bytes(byte ^ 1 for byte in weights[region])
    (folder / "model.safetensors").write_bytes(weights)
    assert model_fingerprint(str(folder)) != before


def test_another_configuration_or_one_more_file_is_another_model(folder: Path) -> None:
    found = {model_fingerprint(str(folder))}
    (folder / "config.json").write_text('{"rope_theta": 1}')
    found.add(model_fingerprint(str(folder)))
    (folder / "more.safetensors").write_bytes(b"")
    found.add(model_fingerprint(str(folder)))
    assert len(found) == 3


def test_a_name_on_the_hub_stands_for_itself() -> None:
    assert model_fingerprint("maker/model") == "maker/model"
