"""A tiny model on disk, examples to train on, and learners: one rank in this process, or several in their own."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from slipstream.algorithms.objective import Objective
from slipstream.config.schema import TrainingConfig
from slipstream.data.trajectory import TrainingExample
from slipstream.training import group as group_module
from slipstream.training.group import LearnerGroup
from slipstream.training.learner import LearnerRank, LearnerSpec
from slipstream.training.process_group import open_listener

VOCABULARY = 61
PROGRAM = Path(__file__).with_name("rank_program.py")

LearnerFactory = Callable[..., LearnerRank]


def save_tiny_model(
    folder: Path,
    *,
    tied: bool = True,
    hidden_size: int = 64,
    initializer_range: float = 0.3,
    heads: tuple[int, int] = (2, 1),
) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def untied_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


def make_spec(
    folder: Path,
    *,
    training: dict | None = None,
    data_parallel: int = 1,
    sequence_parallel: int = 1,
    tensor_parallel: int = 1,
    **changes,
) -> LearnerSpec:
    settings = {"zero_stage": 1, "learning_rate": 1e-2, "epsilon": 1e-3, "gradient_clip": 1e3, "threads": 1}
    settings |= {
        "data_parallel": data_parallel,
        "sequence_parallel": sequence_parallel,
        "tensor_parallel": tensor_parallel,
    }
    spec = LearnerSpec(
        model_path=str(folder),
        dtype="float32",
        training=TrainingConfig(**(settings | (training or {}))),
        temperature=0.6,
        total_optimizer_steps=8,
        load_reference=False,
        seed=0,
        rank=0,
        timeout_s=60.0,
    )
    return replace(spec, **changes)


@pytest.fixture
def learner() -> Iterator[LearnerFactory]:
    """Make started learners of one rank: learner(folder, training={...}, **changes of the spec)."""
    started: list[LearnerRank] = []

    def make(folder: Path, **changes) -> LearnerRank:
        rank = LearnerRank(make_spec(folder, **changes))
        rank.start(rank.meeting_point("127.0.0.1"))
        started.append(rank)
        return rank

    yield make
    for rank in started:
        rank.shutdown()


def run_ranks(jobs: Sequence[list], folder: Path, *, timeout_s: float) -> list[list[dict[str, Any]]]:
    """Run one job per rank (see `rank_program.py`), each in a process, all at the same time; returns their results."""
    # Free a moment ago: the ranks are processes of their own, so rank 0 cannot open it before.
    with open_listener("127.0.0.1") as listener:
        meeting_point = ("127.0.0.1", int(listener.getsockname()[1]))
    processes = []
    try:
        for rank, job in enumerate(jobs):
            job_file, result_file = folder / f"job_{rank}.pickle", folder / f"result_{rank}.pickle"
            job_file.write_bytes(pickle.dumps((meeting_point, job)))
            command = [sys.executable, str(PROGRAM), str(job_file), str(result_file)]
            processes.append((subprocess.Popen(command, stderr=subprocess.PIPE, text=True), result_file))
        results = []
        for process, result_file in processes:
            _, errors = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, errors[-3000:]
            results.append(pickle.loads(result_file.read_bytes()))
        return results
    finally:
        for process, _ in processes:
            process.kill()


class LocalRank:
    """A learner of this process where the controller expects a remote one."""

    name = "rank"

    def __init__(self, learner: LearnerRank) -> None:
        self.learner = learner

    def submit(self, method: str, *arguments: object) -> Any:
        """The answer of the call itself."""
        return getattr(self.learner, method)(*arguments)


@pytest.fixture
def one_rank_group(learner: LearnerFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LearnerGroup]:
    """one_rank_group(folder, tokens, per_unit, share_prompts=..., **changes): one rank as the controller sees it."""
    monkeypatch.setattr(group_module, "gather", lambda calls, deadline_s: list(calls))

    def make(
        folder: Path, tokens: int = 10_000, per_unit: int = 1, *, share_prompts: bool = True, **changes: Any
    ) -> LearnerGroup:
        rank: Any = LocalRank(learner(folder, **({"temperature": 1.0} | changes)))
        return LearnerGroup(
            [rank],
            tokens_per_micro_batch=tokens,
            call_timeout_s=60.0,
            examples_per_unit=per_unit,
            share_prompts=share_prompts,
        )

    return make


@pytest.fixture(scope="session")
def make_examples() -> Callable[..., list[TrainingExample]]:
    return build_examples


@pytest.fixture(scope="session")
def make_value_examples() -> Callable[..., list[TrainingExample]]:
    return build_value_examples


@pytest.fixture(scope="session")
def reward_model_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the decoder of the tiny model and a head with numbers in it."""
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    folder = tmp_path_factory.mktemp("reward-model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def helpers() -> SimpleNamespace:
    return SimpleNamespace(
        weights=weights,
        identical=identical,
        relative_difference=relative_difference,
        make_spec=make_spec,
        run_ranks=run_ranks,
        exported=exported,
        poison=poison,
        step_of=step_of,
        save_tiny_model=save_tiny_model,
    )


def build_examples(lengths: tuple[int, ...] = (5, 9, 9, 14, 3), seed: int = 0) -> list[TrainingExample]:
    """Sequences with a two-token prompt; weights are those of a mean over all loss tokens."""
    generator = np.random.default_rng(seed)
    total = sum(length - 2 for length in lengths)
    examples = []
    for index, length in enumerate(lengths):
        fields = {
            "weight": np.full(length, 1 / total, dtype=np.float32),
            "advantages": np.full(length, generator.normal(), dtype=np.float32),
        }
        tokens = generator.integers(1, VOCABULARY, length)
        examples.append(TrainingExample(f"e{index}", tokens, np.arange(length) >= 2, fields))
    return examples


def build_value_examples(lengths: tuple[int, ...] = (5, 9, 9, 14, 3), seed: int = 0) -> list[TrainingExample]:
    """The same sequences with what a critic learns from."""
    generator = np.random.default_rng(seed + 100)

    def fields(example: TrainingExample) -> dict[str, np.ndarray]:
        returns, old_values = generator.normal(size=(2, len(example.tokens))).astype(np.float32)
        return {"weight": example.token_fields["weight"], "returns": returns, "old_values": old_values}

    return [replace(example, token_fields=fields(example)) for example in build_examples(lengths, seed)]


def weights(learner: LearnerRank) -> dict[str, torch.Tensor]:
    """All weights of a learner of one rank, copied, by Hugging Face name."""
    with learner._weights.parameters(list(learner._weights.shapes)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an exported language model, by Hugging Face name."""
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def step_of(
    group: LearnerGroup, examples: Sequence[TrainingExample], objective: Objective
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The metrics of one step of a group of one rank in this process, and by how much it lowered the weights."""
    rank: Any = group.ranks[0]
    before = weights(rank.learner)
    metrics = group.update([examples], objective)
    return metrics, {name: before[name] - after for name, after in weights(rank.learner).items()}


def poison(example: TrainingExample, position: int, name: str) -> TrainingExample:
    """The example with a NaN at one place of the field `name`."""
    values = example.token_fields[name].copy()
    values[position] = np.nan
    return replace(example, token_fields={**example.token_fields, name: values})


def relative_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any weight, relative to the largest weight of its tensor."""
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected)


def identical(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Equal bit for bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
