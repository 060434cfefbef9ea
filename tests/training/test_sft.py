"""One step of supervised fine-tuning is that of a plain computation, packed or not; two ranks are in another file."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.algorithms.objective import SupervisedObjective
from slipstream.data.trajectory import TrainingExample
from slipstream.workflows.batch import with_token_mean_weights

# A first step of AdamW then moves the weights by the gradient itself, see test_critic.py; by 30 times the gradient, so
# that what the weights are rounded to does not matter.
SCALE, EPSILON = 30, 1e3
STEP_IS_GRADIENT = {"learning_rate": SCALE * EPSILON, "epsilon": EPSILON, "logits_chunk_tokens": 4}
WHOLE, ONE_BY_ONE = 10_000, 1
IGNORED = -100


def conversations(lengths: tuple[int, ...] = (5, 12, 12, 3, 9), seed: int = 4) -> list[TrainingExample]:
    """Sequences in which the assistant spoke here and there, never first."""
    generator = np.random.default_rng(seed)
    examples = []
    for number, length in enumerate(lengths):
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        examples.append(TrainingExample(str(number), generator.integers(1, 60, length), mask))
    return examples


def plain_loss(model: Any, examples: list[TrainingExample], *, padded: bool) -> torch.Tensor:
    """The mean over all learned tokens as Transformers computes it: of a padded batch, or of one row after another."""
    longest = max(len(example.tokens) for example in examples)
    tokens, labels, attention = (np.full((len(examples), longest), value) for value in (0, IGNORED, 0))
    for row, example in enumerate(examples):
        length = len(example.tokens)
        tokens[row, :length], attention[row, :length] = example.tokens, 1
        labels[row, :length] = np.where(example.loss_mask, example.tokens, IGNORED)
    batch = [torch.as_tensor(values) for values in (tokens, attention, labels)]
    if padded:
        rows = [batch]
    else:
        lengths = [len(example.tokens) for example in examples]
        rows = [[values[row : row + 1, :length] for values in batch] for row, length in enumerate(lengths)]
    learned = sum(int(example.loss_mask.sum()) for example in examples)
    losses = [
        torch.nn.functional.cross_entropy(
            model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].flatten(0, 1),
            wanted[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        for ids, mask, wanted in rows
    ]
    return torch.stack(losses).sum() / learned


@pytest.mark.parametrize("padded", [True, False], ids=["against a padded batch", "against rows alone"])
@pytest.mark.parametrize("tokens", [WHOLE, ONE_BY_ONE], ids=["packed", "not packed"])
def test_a_step_is_that_of_a_plain_computation(
    tokens: int, padded: bool, learner: Any, model_folder: Any, helpers: Any, one_rank_group: Any
) -> None:
    examples = conversations()
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager", dtype=torch.float32)
    loss = plain_loss(model, examples, padded=padded)
    loss.backward()
    group = one_rank_group(model_folder, tokens, training={"zero_stage": 0, **STEP_IS_GRADIENT})
    rank = group.ranks[0].learner
    before = helpers.weights(rank)
    metrics = group.update([with_token_mean_weights(examples)], SupervisedObjective())
    gradient = {name: before[name] - after for name, after in helpers.weights(rank).items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: SCALE * each / (1 + each.abs() / EPSILON) for name, each in gradients.items()}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert max(values.abs().max() for values in gradient.values()) > 1e-2
    assert helpers.relative_difference(gradient, expected) <= 1e-5


def test_what_is_not_learned_changes_nothing_but_what_it_is_context_for(one_rank_group: Any, model_folder: Any) -> None:
    """A token behind the last learned one is context for nothing."""
    group = one_rank_group(model_folder, WHOLE)
    (example,) = conversations((9,))
    longer = replace(example, tokens=np.append(example.tokens, 7), loss_mask=np.append(example.loss_mask, False))
    found, expected = (
        group.loss(with_token_mean_weights([each]), SupervisedObjective())["loss"] for each in (longer, example)
    )
    assert found == pytest.approx(expected, rel=1e-6)
