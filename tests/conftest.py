"""What tests of every section may use: a tiny policy made from scratch, rows of data for it, and a wait."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# How long one example takes says more about what else the machine does than about the code.
settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")

SCRIPT = Path(__file__).parents[1] / "scripts" / "document_models.py"
ADDITIONS = [(first, second) for first in range(10) for second in range(10)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `test_kill_anywhere.py` and `test_layouts.py`; here, where pytest looks for them."""
    parser.addoption("--kills", type=int, default=20, help="kills of test_kill_anywhere (default: 20)")
    parser.addoption("--kill-seed", type=int, default=0, help="which kills test_kill_anywhere makes, and when")
    parser.addoption("--every-layout", action="store_true", help="all cells of the table in test_layouts.py")


@pytest.fixture(scope="session")
def families() -> ModuleType:
    """The script with the families, their tiny configurations and the comparison with vLLM."""
    specification = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[SCRIPT.stem] = module  # dataclasses look their module up there
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Byte-level, 320 tokens, with a chat template."""
    from slipstream.data.tokenizer import train_tokenizer

    return train_tokenizer([f"What is {first} + {second}?{first + second}" for first, second in ADDITIONS], 320)


@pytest.fixture(scope="session")
def tiny_policy(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: Llama type, hidden size 64, two layers, random float32 weights, context of 64 tokens."""
    from slipstream.config.schema import ScratchPolicyConfig
    from slipstream.models.scratch import create_policy

    folder = tmp_path_factory.mktemp("policy") / "tiny"
    config = ScratchPolicyConfig(
        hidden_size=64, layers=2, heads=2, intermediate_size=128, vocabulary_size=320, max_tokens=64
    )
    create_policy(config, tiny_tokenizer, seed=0, folder=folder)
    return folder


@pytest.fixture(scope="session")
def tiny_reward_model(tiny_policy: Path, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the decoder and the tokenizer of the tiny policy, and a head with numbers in it."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from slipstream.config.reward_model import SCORE_MOMENTS

    model = AutoModelForSequenceClassification.from_pretrained(tiny_policy, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    setattr(model.config, SCORE_MOMENTS, {"mean": 2.0, "std": 4.0})
    folder = tmp_path_factory.mktemp("reward_model") / "tiny"
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_process_reward_model(tiny_policy: Path, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model with the decoder and the tokenizer of the tiny policy, and a head with numbers in it."""
    import torch
    from transformers import AutoModelForTokenClassification

    from slipstream.config.reward_model import STEP_SEPARATOR

    model = AutoModelForTokenClassification.from_pretrained(tiny_policy, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    torch.nn.init.constant_(model.score.bias, 0.5)
    setattr(model.config, STEP_SEPARATOR, "\n\n")
    folder = tmp_path_factory.mktemp("process_reward_model") / "tiny"
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """until(condition, limit_s=...): wait until it is true; fails where that takes longer."""

    def wait(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def write_rows() -> Callable[[Path, list[dict[str, Any]]], Path]:
    """Writes rows to a file of JSON lines and returns its path."""

    def write(path: Path, rows: list[dict[str, Any]]) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def additions(tmp_path_factory: pytest.TempPathFactory, write_rows: Callable[..., Path]) -> Path:
    """A hundred sums of two digits, with columns prompt, label and response."""
    rows = [
        {"prompt": f"What is {first} + {second}?", "label": str(first + second), "response": str(first + second)}
        for first, second in ADDITIONS
    ]
    return write_rows(tmp_path_factory.mktemp("data") / "additions.jsonl", rows)
