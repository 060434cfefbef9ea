"""Losses equal those that TRL computes for the same rows, from the text on. Left out where TRL is not installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.algorithms.objective import SupervisedObjective
from slipstream.config.data import DataConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.data.conversation import build_sft_examples
from slipstream.data.preferences import answer_examples, build_preference_pairs
from slipstream.training.group import LearnerGroup
from slipstream.workflows.batch import with_token_mean_weights
from slipstream.workflows.preference import AnswerRow, make_objective, with_reference, with_row_mean_weights

trl = pytest.importorskip("trl", reason="TRL, which the losses are compared with, is not installed")

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": "What is 1 + 2?", "chosen": "3", "rejected": "I do not know"},
    {"prompt": "And 2 + 9?", "chosen": "It is 11.", "rejected": "12"},
    {"prompt": "9 + 9?", "chosen": "18", "rejected": "81"},
]
NOTHING_ELSE = {"per_device_train_batch_size": len(ROWS), "report_to": "none", "use_cpu": True, "bf16": False}


def messages(row: dict[str, str], *columns: str) -> dict[str, Any]:
    """A row as TRL has conversations."""
    prompt = [{"role": "user", "content": row["prompt"]}]
    return {"prompt": prompt} | {column: [{"role": "assistant", "content": row[column]}] for column in columns}


def loss_of(trainer: Any) -> float:
    """What a trainer of TRL computes for its first batch, which holds all rows."""
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch)))


@pytest.fixture(scope="module")
def reference(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny policy a little moved."""
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture
def group(one_rank_group: Callable[..., LearnerGroup], tiny_policy: Path) -> LearnerGroup:
    return one_rank_group(tiny_policy, 40, 2, load_reference=True)


def test_the_loss_of_supervised_fine_tuning(
    tiny_policy: Path, group: LearnerGroup, tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    rows = [messages(row, "chosen") for row in ROWS]
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32),
        args=trl.SFTConfig(output_dir=str(tmp_path / "trl"), max_length=64, **NOTHING_ELSE),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tiny_policy),
    )
    config = DataConfig(source=str(write_rows(tmp_path / "rows.jsonl", rows)))
    examples, _ = build_sft_examples(config, AutoTokenizer.from_pretrained(tiny_policy), 64)
    ours = group.loss(with_token_mean_weights(examples), SupervisedObjective())
    assert ours["loss"] == pytest.approx(loss_of(trainer), rel=1e-5)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_the_loss_of_preference_training(
    tiny_policy: Path,
    reference: Any,
    group: LearnerGroup,
    tmp_path: Path,
    write_rows: Callable[..., Path],
    beta: float,
) -> None:
    rows = [messages(row, "chosen", "rejected") for row in ROWS]
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32),
        ref_model=reference,
        args=trl.DPOConfig(output_dir=str(tmp_path / "trl"), max_length=64, beta=beta, **NOTHING_ELSE),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tiny_policy),
    )
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    pairs, _ = build_preference_pairs(DataConfig(source=path), AutoTokenizer.from_pretrained(tiny_policy), 64)
    group.ranks[0].learner._reference.refresh(reference.named_parameters())
    answers = with_reference([AnswerRow(tuple(answer_examples(pair))) for pair in pairs], group, role="reference")
    settings = {"steps": 1, "output_dir": "o", "model": {"path": "m"}, "data": {"source": path}}
    objective = make_objective(PreferenceConfig.model_validate(settings | {"beta": beta}))
    ours = group.loss(with_row_mean_weights(answers), objective)
    assert ours["loss"] == pytest.approx(loss_of(trainer), rel=1e-5)
