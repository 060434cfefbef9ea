"""A learner rank in the role of the process reward model: answers in, the score of each labelled step learned from."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from slipstream.algorithms.step_loss import StepObjective
from slipstream.data.steps import LabelledSteps, step_example
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ModelError, TrainingError

STAGES = (0, 1, 2, 3)
OBJECTIVE = StepObjective()
# A first step of AdamW then moves the weights by the gradient itself, see test_critic.py.
STEP_IS_GRADIENT = {"learning_rate": 1e3, "epsilon": 1e3}
NONE = float("nan")


def make_answers(seed: int = 0) -> list[LabelledSteps]:
    """Three answers with hard, soft and missing labels, seven of them in all."""
    generator = np.random.default_rng(seed)
    kinds = [(9, (3, 5, 8), (1.0, NONE, 0.0)), (5, (2, 4), (0.3, 1.0)), (14, (4, 9, 12, 13), (0.0, 1.0, NONE, 0.8))]
    return [
        LabelledSteps(str(row), generator.integers(1, 60, length), np.array(ends), np.array(labels, dtype=np.float32))
        for row, (length, ends, labels) in enumerate(kinds)
    ]


def weighted(answers: Sequence[LabelledSteps], total: int = 7) -> list[TrainingExample]:
    """The examples of answers, with the weights of an optimizer step of `total` labelled steps."""
    examples = [step_example(answer) for answer in answers]
    return [
        replace(
            example,
            token_fields=example.token_fields | {"weight": np.full(len(example.tokens), 1 / total, dtype=np.float32)},
        )
        for example in examples
    ]


@pytest.fixture(scope="session")
def process_model_folder(model_folder, tmp_path_factory):
    """A process reward model with the decoder of the tiny model, and a head with numbers in it."""
    model = AutoModelForTokenClassification.from_pretrained(model_folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    torch.nn.init.constant_(model.score.bias, 0.4)
    folder = tmp_path_factory.mktemp("process-reward-model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def process_model(learner, process_model_folder):
    """process_model(folder, training=...): a started rank, by default of a model with a head."""

    def make(folder=process_model_folder, **changes):
        return learner(folder, role="process_reward_model", **changes)

    return make


def load_plainly(folder):
    model = AutoModelForTokenClassification.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def plain_scores(model, tokens: np.ndarray) -> torch.Tensor:
    """What Transformers makes of each token of one sequence."""
    return model(torch.as_tensor(tokens).unsqueeze(0)).logits[0, :, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_is_that_of_a_plain_computation(stage, process_model, process_model_folder, helpers):
    """The mean over the seven steps with a label, written out; steps without one are not in it."""
    model, losses = load_plainly(process_model_folder), []
    for answer in make_answers():
        scores = plain_scores(model, answer.tokens)
        for step, label in answer.labelled:
            probability = torch.sigmoid(scores[answer.ends[step]])
            losses.append(-label * probability.log() - (1 - label) * (1 - probability).log())
    loss = torch.stack(losses).mean()
    loss.backward()
    assert len(losses) == 7
    rank = process_model(training={"zero_stage": stage, **STEP_IS_GRADIENT})
    before = helpers.weights(rank)
    metrics = rank.update([weighted(make_answers())], OBJECTIVE)
    found = {name: before[name] - after for name, after in helpers.weights(rank).items()}
    # A first step of AdamW: the rate times g / (|g| + epsilon).
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: 1e3 * gradient / (gradient.abs() + 1e3) for name, gradient in gradients.items()}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5) and metrics["tokens"] == 7
    assert "score.bias" in found
    assert helpers.relative_difference(found, expected) <= 1e-4


CUTS: dict[str, Callable] = {
    "one by one": lambda examples: [[example] for example in examples],
    "reversed": lambda examples: [examples[::-1]],
    "with zero-weight micro-batches": lambda examples: [[], examples[2:], [], examples[:2], []],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("stage", (0, 3))
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(stage, cut, process_model, helpers):
    examples, gradients, metrics = weighted(make_answers()), [], []
    for micro_batches in ([examples], cut(examples)):
        rank = process_model(training={"zero_stage": stage, **STEP_IS_GRADIENT})
        before = helpers.weights(rank)
        metrics.append(rank.update(micro_batches, OBJECTIVE))
        gradients.append({name: before[name] - after for name, after in helpers.weights(rank).items()})
    assert max(gradient.abs().max() for gradient in gradients[0].values()) > 1e-2
    assert helpers.relative_difference(gradients[1], gradients[0]) <= 1e-5
    for name in metrics[0].keys() - {"seconds"}:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-6), name


def test_scores_and_metrics_are_those_of_transformers_at_the_ends_of_steps(process_model, process_model_folder):
    answers, model, rank = make_answers(), load_plainly(process_model_folder), process_model()
    found = rank.scores([[step_example(answer)] for answer in answers])
    scores, labels = [], []
    for answer in answers:
        places = [answer.ends[step] for step, _ in answer.labelled]
        expected = plain_scores(model, answer.tokens)[places].detach().numpy()
        assert found[answer.answer_id] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        scores += expected.tolist()
        labels += [label for _, label in answer.labelled]
    metrics = rank.loss([weighted(answers)], OBJECTIVE)
    is_true = np.array(labels) >= 0.5
    assert metrics["accuracy"] == pytest.approx(np.mean((np.array(scores) >= 0) == is_true))
    assert metrics["true_share"] == pytest.approx(np.mean(is_true))


def test_an_ignored_label_changes_nothing_whatever_its_step_says(process_model):
    """Another framework that took -100 for true would find four of the seven steps and two more to be true."""
    answers = make_answers()
    others = [replace(answer, labels=np.nan_to_num(answer.labels, nan=0.0)) for answer in answers]
    rank = process_model()
    found, changed = (rank.loss([weighted(given)], OBJECTIVE) for given in (answers, others))
    assert (found["tokens"], changed["tokens"]) == (7, 9)
    assert found["true_share"] == pytest.approx(4 / 7) and changed["true_share"] == pytest.approx(4 / 9)


def test_a_language_model_finds_every_step_as_likely_as_not_and_learns(process_model, model_folder):
    rank, examples = process_model(model_folder), weighted(make_answers())
    first = rank.update([examples], OBJECTIVE)
    entropy = np.mean([np.log(2)] * 7)
    assert first["loss"] == pytest.approx(entropy, rel=1e-5)
    for _ in range(25):
        last = rank.update([examples], OBJECTIVE)
    assert last["accuracy"] == 1.0 and last["loss"] < 0.5 * first["loss"]


def test_the_export_gives_the_same_scores_in_transformers(process_model, model_folder, tmp_path):
    rank, answers = process_model(model_folder), make_answers()
    for _ in range(3):
        rank.update([weighted(answers)], OBJECTIVE)
    rank.export(str(tmp_path))
    model = load_plainly(tmp_path)
    assert type(model).__name__ == "LlamaForTokenClassification" and model.config.num_labels == 1
    found = rank.scores([[step_example(answer) for answer in answers]])
    for answer in answers:
        places = [answer.ends[step] for step, _ in answer.labelled]
        expected = plain_scores(model, answer.tokens)[places].detach().numpy()
        assert found[answer.answer_id] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert np.abs(expected).max() > 1e-3


def test_training_goes_on_bit_for_bit_from_a_checkpoint(process_model, model_folder, helpers, tmp_path):
    steps = [weighted(make_answers(seed)) for seed in range(3)]
    straight, resumed = process_model(model_folder), process_model(model_folder)
    straight.update([steps[0]], OBJECTIVE)
    straight.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    for examples in steps[1:]:
        before, after = (rank.update([examples], OBJECTIVE) for rank in (straight, resumed))
        assert {**after, "seconds": 0} == {**before, "seconds": 0}
    assert helpers.identical(helpers.weights(resumed), helpers.weights(straight))


def test_what_scores_something_else_is_no_start(
    process_model, learner, model_folder, process_model_folder, reward_model_folder
):
    with pytest.raises(
        ModelError, match=r"^model\.path: .* reward model of whole answers, .* expected a process reward"
    ):
        process_model(reward_model_folder)
    for role in ("reward_model", "critic"):
        with pytest.raises(ModelError, match=r"^model\.path: .* is a process reward model, .* expected a reward model"):
            learner(process_model_folder, role=role)
    with pytest.raises(TrainingError, match="a critic has no scores"):
        learner(model_folder, role="critic").scores([[step_example(make_answers()[0])]])
