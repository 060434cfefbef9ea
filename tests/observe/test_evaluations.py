"""What is written down of an evaluation, and how it is found again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.observe.evaluations import (
    Evaluation,
    EvaluationSample,
    EvaluationWriter,
    by_dataset,
    pair_samples,
    read_evaluations,
)

MakeEvaluation = Callable[..., Evaluation]


def samples(*prompts: str, response: str = "answer") -> list[EvaluationSample]:
    return [EvaluationSample(prompt, None, response, None) for prompt in prompts]


def test_evaluations_come_back_as_they_were_written(tmp_path: Path, make_evaluation: MakeEvaluation) -> None:
    path = tmp_path / "evaluations.jsonl"
    writer = EvaluationWriter(path)
    written = [make_evaluation(step, 0.1, dataset=name) for step in (0, 5, 10) for name in ("held-out", "math")]
    for evaluation in written:
        writer.write(evaluation)
    assert read_evaluations(path) == written
    writer.truncate_after(5)
    assert read_evaluations(path) == written[:4], "all sets of a step go or stay together"
    writer.close()
    assert read_evaluations(tmp_path / "none.jsonl") == []


def test_a_line_of_an_evaluation_has_the_documented_names(tmp_path: Path, make_evaluation: MakeEvaluation) -> None:
    path = tmp_path / "evaluations.jsonl"
    EvaluationWriter(path).write(make_evaluation(20, 0.5, policy_version=19, unscored=3, samples=samples("a")))
    assert json.loads(path.read_text()) == {
        "step": 20,
        "policy_version": 19,
        "dataset": "held-out",
        "prompts": 256,
        "samples_per_prompt": 2,
        "sampled_accuracy": 0.5,
        "greedy_accuracy": 0.65,
        "pass_at_k": {"pass@1": 0.5, "pass@2": 0.8},
        "mean_reward": 0.49,
        "mean_length": 3.2,
        "max_length": 16,
        "truncated_share": 0.01,
        "greedy_mean_length": 3.0,
        "greedy_max_length": 8,
        "greedy_truncated_share": 0.0,
        "unscored": 3,
        "samples": [{"prompt": "a", "label": None, "response": "answer", "reward": None}],
    }


@pytest.mark.parametrize(("dataset", "prefix"), [("held-out", ""), ("math", "math/")])
def test_metrics_are_named_after_their_set_unless_it_is_the_first(
    make_evaluation: MakeEvaluation, dataset: str, prefix: str
) -> None:
    metrics = make_evaluation(20, 0.5, dataset=dataset).metrics
    assert metrics == {
        f"{prefix}{name}": value
        for name, value in {
            "sampled_accuracy": 0.5, "greedy_accuracy": 0.65, "pass@1": 0.5, "pass@2": 0.8, "mean_reward": 0.49,
            "mean_length": 3.2, "max_length": 16, "truncated_share": 0.01, "greedy_mean_length": 3.0,
            "greedy_max_length": 8, "greedy_truncated_share": 0.0, "unscored": 0,
        }.items()
    }  # fmt: skip


def test_every_metric_that_can_choose_the_best_is_measured(make_evaluation: MakeEvaluation) -> None:
    from slipstream.config.evaluation import best_metrics

    measured = make_evaluation(0, 0.5).metrics | make_evaluation(0, 0.5, dataset="math").metrics
    assert set(best_metrics(["math"], 2)) <= measured.keys()


def test_evaluations_are_sorted_by_set_and_the_first_set_leads(make_evaluation: MakeEvaluation) -> None:
    written = [make_evaluation(step, 0.1, dataset=name) for step in (0, 5) for name in ("math", "held-out", "code")]
    sets = by_dataset(written)
    assert list(sets) == ["held-out", "math", "code"]
    assert [evaluation.step for evaluation in sets["math"]] == [0, 5]
    assert by_dataset([]) == {}


def test_samples_are_paired_by_their_prompt_not_by_their_position(make_evaluation: MakeEvaluation) -> None:
    before = make_evaluation(0, 0.1, samples=samples("a", "b", "c", response="before"))
    after = make_evaluation(9, 0.1, samples=samples("c", "x", "a", response="after"))
    pairs = pair_samples(before, after)
    assert [(first.prompt, last.prompt) for first, last in pairs] == [("c", "c"), ("a", "a")]
    assert pairs[0][0].response == "before" and pairs[0][1].response == "after"
