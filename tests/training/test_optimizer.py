"""Optimizers beside AdamW: fused AdamW is AdamW, and Muon does what its formulas say, to those that it is for."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slipstream.algorithms.objective import SupervisedObjective
from slipstream.algorithms.value_loss import ValueObjective
from slipstream.training.optimizer import hidden_matrices

SUPERVISED = SupervisedObjective()
MUON = {"zero_stage": 0, "optimizer": "muon", "learning_rate": 0.02, "weight_decay": 0.1}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fused_adamw_updates_as_adamw_does(stage, learner, model_folder, make_examples, helpers):
    settings = {"zero_stage": stage, "weight_decay": 0.1, "epsilon": 1.0}
    ranks = [learner(model_folder, training=settings | {"optimizer": name}) for name in ("adamw", "fused_adamw")]
    before = helpers.weights(ranks[0])
    for seed in range(3):
        for rank in ranks:
            rank.update([make_examples(seed=seed)], SUPERVISED)
    plain, fused = map(helpers.weights, ranks)
    assert helpers.relative_difference(fused, plain) <= 1e-6
    assert helpers.relative_difference(plain, before) > 1e-4
    assert all(group["fused"] for group in ranks[1]._engine.optimizer.param_groups)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of the quintic on the singular values, which is what the iteration on the matrix amounts to."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


def test_muon_updates_matrices_by_its_formulas_and_all_else_by_adamw(learner, untied_model_folder, make_examples):
    """Gradients come from plain PyTorch, with attention of Transformers' own."""
    rank = learner(untied_model_folder, training=MUON | {"epsilon": 0.1}, temperature=1.0)
    plain = AutoModelForCausalLM.from_pretrained(untied_model_folder, attn_implementation="eager")
    parameters = dict(plain.named_parameters())
    matrices = {name for name, p in parameters.items() if p.dim() == 2 and "embed" not in name and "head" not in name}
    assert len(matrices) == 2 * 7, "four of the attention and three of the feed-forward layer, in two layers"
    others = [p for name, p in parameters.items() if name not in matrices]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() == 2]},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.02, betas=(0.9, 0.95), eps=0.1, weight_decay=0.1,
    )  # fmt: skip
    momentum = {name: torch.zeros_like(parameters[name]) for name in matrices}
    for seed in range(2):
        start = {name: p.detach().clone() for name, p in parameters.items()}
        with torch.no_grad():
            for name, parameter in rank._engine.module.model.named_parameters():
                parameter.copy_(start[name])
        # Enough tokens for gradients of full rank: bfloat16 blows noise up in directions that have next to none.
        examples = make_examples((60, 70, 80), seed=seed)
        rank.update([examples], SUPERVISED)
        plain.zero_grad()
        for example in examples:
            row = torch.as_tensor(example.tokens)
            log_probs = torch.log_softmax(plain(input_ids=row[None], use_cache=False).logits[0, :-1], -1)
            chosen = log_probs.gather(-1, row[1:, None])[:, 0]
            weight = torch.as_tensor(example.token_fields["weight"][1:]) * torch.as_tensor(example.loss_mask[1:])
            (-chosen * weight).sum().backward()
        adamw.step()
        found = dict(rank._engine.module.model.named_parameters())
        with torch.no_grad():
            for name in matrices:
                parameter, gradient = parameters[name], parameters[name].grad
                momentum[name] = 0.95 * momentum[name] + 0.05 * gradient
                update = orthogonalised(0.05 * gradient + 0.95 * momentum[name])
                size = 0.2 * max(parameter.shape) ** 0.5
                parameter.copy_((1 - 0.02 * 0.1) * parameter - 0.02 * size * update)
        for name, parameter in parameters.items():
            moved, expected = found[name] - start[name], parameter - start[name]
            # The iteration runs in bfloat16, which has 8 bits.
            tolerance = 0.06 if name in matrices else 1e-4
            assert (moved - expected).norm() <= tolerance * expected.norm(), name


def test_muon_leaves_the_head_of_a_critic_to_adamw(learner, reward_model_folder, make_value_examples):
    rank = learner(reward_model_folder, training=MUON, role="critic")
    losses = [rank.update([make_value_examples()], ValueObjective(value_clip=10.0))["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    model = AutoModelForSequenceClassification.from_pretrained(reward_model_folder)
    chosen = {id(parameter) for parameter in hidden_matrices(model)}
    assert id(model.score.weight) not in chosen and len(chosen) == 14


def test_muon_goes_on_bit_for_bit_and_follows_the_schedule(learner, model_folder, make_examples, helpers, tmp_path):
    settings = MUON | {"schedule": "cosine", "warmup_steps": 2}
    straight, resumed = (learner(model_folder, training=settings) for _ in range(2))
    rates = [straight.update([make_examples(seed=seed)], SUPERVISED)["learning_rate"] for seed in range(2)]
    assert rates == [0.01, 0.02]
    straight.save(str(tmp_path))
    resumed.load(str(tmp_path))
    for seed in (2, 3):
        expected, found = (rank.update([make_examples(seed=seed)], SUPERVISED) for rank in (straight, resumed))
        assert {**found, "seconds": 0} == {**expected, "seconds": 0}
    assert helpers.identical(helpers.weights(resumed), helpers.weights(straight))
    groups = resumed._engine.optimizer.param_groups
    assert {group["lr"] for group in groups} == {found["learning_rate"]} and len(groups) == 3


def test_a_step_of_muon_that_is_not_finite_is_dropped_and_leaves_no_trace(
    learner, model_folder, make_examples, helpers
):
    clean, poisoned = (learner(model_folder, training=MUON) for _ in range(2))
    examples = make_examples()
    examples[0].token_fields["weight"][:] = float("nan")
    assert poisoned.update([examples], SUPERVISED)["skipped"] == 1
    for rank in (clean, poisoned):
        rank.update([make_examples(seed=1)], SUPERVISED)
    assert helpers.identical(helpers.weights(poisoned), helpers.weights(clean))
