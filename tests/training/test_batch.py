"""Tensors of a micro-batch, and the one that a rank without work runs."""

import numpy as np
import pytest
import torch

from slipstream.data.trajectory import TrainingExample
from slipstream.training.batch import make_micro_batch


def test_tensors_hold_what_was_packed(make_examples):
    examples = make_examples((5, 9))
    batch = make_micro_batch(examples, "cpu")
    assert batch.tokens.tolist() == [*examples[0].tokens, *examples[1].tokens]
    assert batch.positions.tolist() == [*range(5), *range(9)]
    assert batch.lengths == [5, 9] and batch.example_ids == ["e0", "e1"]
    assert torch.equal(batch.tokens[batch.predictors + 1], batch.targets)
    assert batch.loss_tokens == 3 + 7
    assert batch.sequence_index.tolist() == [0] * 3 + [1] * 7
    for tensor in (batch.tokens, batch.positions, batch.predictors, batch.targets, batch.sequence_index):
        assert tensor.dtype == torch.int64
    assert {name: (t.dtype, t.shape) for name, t in batch.fields.items()} == {
        "weight": (torch.float32, (10,)),
        "advantages": (torch.float32, (10,)),
    }


def test_no_examples_make_one_token_that_nothing_is_learned_from():
    batch = make_micro_batch([], "cpu")
    assert batch.tokens.shape == (1,) and batch.lengths == [1]
    assert batch.loss_tokens == 0 and batch.example_ids == [] and batch.fields == {}


def test_a_row_has_a_token_for_each_rank_that_shares_it(make_examples):
    batch = make_micro_batch(make_examples((3,)), "cpu", least_tokens=5)
    assert batch.lengths == [3, 1, 1] and batch.positions.tolist() == [0, 1, 2, 0, 0] and batch.prompts == [None] * 3
    assert batch.loss_tokens == 1 and batch.example_ids == ["e0"]
    assert make_micro_batch([], "cpu", least_tokens=4).lengths == [1] * 4


def test_a_loss_token_that_nothing_predicts_is_refused():
    with pytest.raises(ValueError, match="first token is a loss token"):
        make_micro_batch([TrainingExample("e", np.arange(3), np.ones(3, dtype=bool))], "cpu")
