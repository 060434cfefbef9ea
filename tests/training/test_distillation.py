"""A student learning from a teacher's distribution: what one optimizer step computes, however it is cut."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.algorithms.objective import DistillationObjective
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ModelError, TrainingError
from slipstream.training.reference import TeacherSpec

STAGES = (0, 1, 2, 3)
TEMPERATURE, COEFFICIENT = 2.0, 0.7
OBJECTIVE = DistillationObjective(coefficient=COEFFICIENT, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory, helpers):
    """Another width than the student's, an untied head, and other weights."""
    return helpers.save_tiny_model(tmp_path_factory.mktemp("teacher"), tied=False, hidden_size=96)


@pytest.fixture
def student(learner, model_folder, teacher_folder):
    def make(divergence: str | None = "forward", **changes):
        teacher = TeacherSpec(str(teacher_folder), "teacher.path", divergence, TEMPERATURE)
        return learner(model_folder, temperature=1.0, teacher=teacher, **changes)

    return make


def plain_loss(model, teacher, examples: Sequence[TrainingExample], divergence: str) -> torch.Tensor:
    """The loss of a step with the whole matrices of logits, one example at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for example in examples:
        row = torch.as_tensor(example.tokens).unsqueeze(0)
        mask = torch.as_tensor(example.loss_mask[1:])
        logits = model(input_ids=row, use_cache=False).logits[0, :-1][mask]
        with torch.no_grad():
            teacher_logits = teacher(input_ids=row, use_cache=False).logits[0, :-1][mask]
        ours, theirs = (torch.distributions.Categorical(logits=each / TEMPERATURE) for each in (logits, teacher_logits))
        pair = (theirs, ours) if divergence == "forward" else (ours, theirs)
        kl = torch.distributions.kl_divergence(*pair)
        cross_entropy = torch.nn.functional.cross_entropy(logits, row[0, 1:][mask], reduction="none")
        weight = torch.as_tensor(example.token_fields["weight"][1:])[mask]
        loss = COEFFICIENT * TEMPERATURE**2 * kl + (1 - COEFFICIENT) * cross_entropy
        total = total + (loss * weight).double().sum()
    return total


def plain_weights(model_folder, teacher_folder, examples, divergence, training) -> tuple[float, float, dict]:
    """Loss, gradient norm and weights after one step in plain PyTorch."""
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        for folder in (model_folder, teacher_folder)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, betas=tuple(training.betas), eps=training.epsilon, weight_decay=0
    )
    loss = plain_loss(model, teacher, examples, divergence)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip)
    optimizer.step()
    return loss.item(), norm.item(), {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize("stage", STAGES)
def test_updated_weights_equal_those_of_a_plain_computation(
    stage, divergence, student, model_folder, teacher_folder, make_examples, helpers
):
    rank, examples = student(divergence, training={"zero_stage": stage, "logits_chunk_tokens": 4}), make_examples()
    metrics = rank.update([examples[:2], examples[2:]], OBJECTIVE)
    loss, norm, weights = plain_weights(model_folder, teacher_folder, examples, divergence, rank._spec.training)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert helpers.relative_difference(helpers.weights(rank), weights) <= 1e-5
    parts = COEFFICIENT * TEMPERATURE**2 * metrics["divergence"] + (1 - COEFFICIENT) * metrics["cross_entropy"]
    assert metrics["loss"] == pytest.approx(parts, rel=1e-5)


CUTS = {
    "one by one": lambda e: [[x] for x in e],
    "reversed": lambda e: [list(reversed(e))],
    "with zero-weight micro-batches": lambda e: [[], e[:3], [], e[3:], []],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("stage", (0, 3))
def test_the_update_does_not_depend_on_how_the_step_is_cut(stage, cut, student, make_examples, helpers):
    examples = make_examples()
    whole = student(training={"zero_stage": stage})
    parts = student(training={"zero_stage": stage, "logits_chunk_tokens": 3})
    metrics, part_metrics = whole.update([examples], OBJECTIVE), parts.update(cut(examples), OBJECTIVE)
    assert helpers.relative_difference(helpers.weights(parts), helpers.weights(whole)) <= 1e-5
    for name in metrics.keys() - {"seconds"}:
        assert part_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


def test_the_teacher_never_changes_and_answers_with_its_own_log_probs(student, teacher_folder, make_examples):
    rank, examples = student(), make_examples()
    before = rank.log_probs([examples], "teacher")
    rank.update([examples], OBJECTIVE)
    after = rank.log_probs([examples[:2], examples[2:]], "teacher")
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, attn_implementation="eager", dtype=torch.float32)
    for example in examples:
        row = torch.as_tensor(example.tokens).unsqueeze(0)
        distribution = torch.log_softmax(teacher(input_ids=row, use_cache=False).logits[0, :-1], -1)
        expected = distribution.gather(-1, row[0, 1:].unsqueeze(-1)).squeeze(-1).detach().numpy()
        np.testing.assert_allclose(before[example.example_id], expected[example.loss_mask[1:]], atol=1e-4)
        np.testing.assert_allclose(after[example.example_id], before[example.example_id], atol=1e-5)


def test_a_teacher_that_only_grades_is_not_compared_with(student, make_examples):
    rank = student(None)
    with pytest.raises(KeyError, match="divergence"):
        rank.update([make_examples()], OBJECTIVE)


def test_without_a_teacher_there_are_no_log_probs_of_one(learner, model_folder, make_examples):
    with pytest.raises(TrainingError, match="has no teacher"):
        learner(model_folder).log_probs([make_examples()], "teacher")


def test_a_teacher_that_cannot_be_loaded_is_named_by_its_key(learner, model_folder, tmp_path):
    with pytest.raises(ModelError, match=r"^algorithm\.teacher: no folder '/nowhere'"):
        learner(model_folder, teacher=TeacherSpec("/nowhere", "algorithm.teacher"))


def test_a_checkpoint_goes_on_bit_for_bit_and_holds_no_teacher(student, make_examples, helpers, tmp_path):
    first, examples = student(), make_examples()
    first.update([examples], OBJECTIVE)
    first.save(str(tmp_path))
    assert not list(tmp_path.rglob("*.safetensors"))
    second = student()
    second.load(str(tmp_path))
    metrics = [rank.update([examples], OBJECTIVE) for rank in (first, second)]
    assert helpers.identical(helpers.weights(second), helpers.weights(first))
    assert {**metrics[1], "seconds": 0} == {**metrics[0], "seconds": 0}


def test_a_nan_in_a_field_of_a_loss_token_skips_the_step(student, make_examples, helpers):
    rank, examples = student(), make_examples()
    before = helpers.weights(rank)
    weight = examples[1].token_fields["weight"].copy()
    weight[5] = np.nan
    poisoned = replace(examples[1], token_fields={**examples[1].token_fields, "weight": weight})
    metrics = rank.update([[examples[0]], [poisoned], examples[2:]], OBJECTIVE)
    assert metrics["skipped"] == 1 and metrics["nonfinite_examples"] == ["e1"]
    assert helpers.identical(helpers.weights(rank), before)
