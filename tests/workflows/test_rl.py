"""A whole RL run: what it leaves behind, and that its numbers are what they claim to be."""

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- the run directory


def test_the_last_line_of_the_output_is_the_summary(finished_run: Any) -> None:
    bench, process = finished_run
    printed = json.loads(process.stdout.splitlines()[-1])
    assert printed == json.loads((bench.folder / "run/summary.json").read_text())
    assert printed["steps"] == 6
    assert printed["run_dir"] == str(bench.folder / "run")
    assert {"accuracy_before", "accuracy_after", "seconds"} <= printed.keys()


def test_the_run_directory_is_complete(finished_run: Any) -> None:
    run = finished_run[0].folder / "run"
    names = {
        "config.yaml", "environment.json", "metrics.jsonl", "timeline.json", "ledger.jsonl", "rollouts", "checkpoints",
        "export", "report.html", "summary.json", "evaluations.jsonl", "tensorboard", "logs",
    }  # fmt: skip
    assert names <= {path.name for path in run.iterdir()}
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "step-000002", "step-000004", "step-000006",
    ]  # fmt: skip
    assert list((run / "tensorboard").glob("events.*"))
    assert any(path.stat().st_size for path in (run / "logs").iterdir())


def test_the_configuration_in_the_run_directory_is_resolved(finished_run: Any) -> None:
    from slipstream.config.loader import load_config
    from slipstream.config.schema import RLConfig

    run = finished_run[0].folder / "run"
    config = load_config(RLConfig, str(run / "config.yaml"), [])
    assert config.training.betas == [0.9, 0.95], "defaults are written down too"


def test_metrics_have_one_line_a_step_and_only_finite_numbers(finished_run: Any) -> None:
    metrics = lines(finished_run[0].folder / "run/metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["policy_version"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert not any("non_finite" in line for line in metrics)
    expected = {"reward/mean", "policy/loss", "policy/entropy", "time/generate", "time/train", "time/publish"}
    assert expected <= metrics[0].keys()


def test_the_timeline_opens_and_has_a_lane_per_engine(finished_run: Any) -> None:
    events = json.loads((finished_run[0].folder / "run/timeline.json").read_text())
    lanes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert {"controller", "rollout engine 0", "reward engine"} <= lanes.keys()
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in spans)
    phases = [event["name"] for event in spans if event["pid"] == lanes["controller"]]
    for name in ("generate", "prepare", "train", "publish"):
        assert phases.count(name) == 6
    assert phases.count("evaluate") == 3 and phases.count("checkpoint") == 3


def test_the_ledger_balances(finished_run: Any) -> None:
    from slipstream.observe.ledger import read_balance

    balance = read_balance(finished_run[0].folder / "run/ledger.jsonl")
    assert (balance.issued, balance.trained, balance.pending) == (24, 24, 0)


def test_held_out_prompts_are_not_trained_on(finished_run: Any) -> None:
    bench, _ = finished_run
    held_out = {json.loads(line)["prompt"] for line in bench.rows.read_text().splitlines()[:6]}
    trained = [json.loads(line)["prompt"] for line in bench.rollouts("run")]
    assert trained
    assert not any(question in prompt for question in held_out for prompt in trained)


def test_evaluations_are_made_before_between_and_after(finished_run: Any) -> None:
    evaluations = lines(finished_run[0].folder / "run/evaluations.jsonl")
    assert [evaluation["step"] for evaluation in evaluations] == [0, 3, 6]
    assert all(evaluation["prompts"] == 6 for evaluation in evaluations)
    for name in ("sampled_accuracy", "greedy_accuracy"):
        assert all(evaluation[name] * 6 == pytest.approx(round(evaluation[name] * 6)) for evaluation in evaluations)


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("run", ["finished_run", "finished_vllm_run"])
def test_the_engine_and_the_trainer_agree(run: str, request: pytest.FixtureRequest) -> None:
    """On policy: the ratio is 1, and what the engine says it sampled with is what the trainer computes."""
    bench, _ = request.getfixturevalue(run)
    trained = [line for line in lines(bench.folder / "run/metrics.jsonl") if "policy/ratio" in line]
    assert len(trained) >= 5
    for line in trained:
        assert line["policy/ratio"] == pytest.approx(1.0, abs=1e-4)
        assert line["policy/clip_share"] == 0
        assert line["policy/mismatch_abs_max"] < 1e-4
        assert line["policy/mismatch_k3"] < 1e-8
        assert line["weights/probe_difference"] <= 1e-4


def test_the_policy_changes_and_the_gradient_is_not_zero(finished_run: Any) -> None:
    metrics = lines(finished_run[0].folder / "run/metrics.jsonl")
    assert all(line["policy/gradient_norm"] > 0 for line in metrics)
    assert all(line["policy/skipped"] == 0 for line in metrics)


def test_without_a_kl_term_there_is_no_reference(finished_run: Any) -> None:
    metrics = lines(finished_run[0].folder / "run/metrics.jsonl")
    assert not any("policy/kl" in line for line in metrics)


def test_the_export_is_what_was_trained(finished_run: Any) -> None:
    """The newest checkpoint's weights, with the tokenizer, loaded by Transformers, and not those of the start."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bench, _ = finished_run
    run = bench.folder / "run"
    exported = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(bench.policy, dtype=torch.float32)
    states = torch.load(run / "checkpoints/step-000006/learner/engine/mp_rank_00_model_states.pt", weights_only=False)
    trained = {name.removeprefix("model."): value for name, value in states["module"].items()}
    parameters = dict(exported.named_parameters())
    assert parameters.keys() <= trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in parameters.items())
    assert not torch.equal(exported.model.embed_tokens.weight, original.model.embed_tokens.weight)
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(bench.policy).chat_template


# ---------------------------------------------------------------- the same from Python, beside another run


PYTHON_RUN = """
import json
from slipstream import RLConfig, train_rl
from slipstream.config.loader import load_config
from rewards import digest

config = load_config(RLConfig, None, {overrides!r})
print(json.dumps(train_rl(config, reward=lambda text: digest(text))))
"""


# Of Ray, its dashboard and its clients, and of PyTorch.
DEFAULT_PORTS = (6379, 8265, 10001, 29500)


@contextmanager
def occupied(ports: Sequence[int]) -> Iterator[None]:
    """Somebody listens at these ports: us, where nobody else does."""
    with ExitStack() as stack:
        for port in ports:
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("", port))
                listener.listen()
        yield


@pytest.fixture(scope="module")
def two_at_once(finished_run: Any, make_workbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`train_rl` with a function object and the seed of the finished run, and beside it a run with another seed.

    The ports that Ray and PyTorch take by default are occupied meanwhile.
    """
    bench = make_workbench(tmp_path_factory.mktemp("two"))
    settings = bench.evaluated_settings(output_dir="python", reward__function=None)
    overrides = [f"--{key}={value}" for key, value in settings.items() if value is not None and "options" not in key]
    with occupied(DEFAULT_PORTS):
        first = bench.script(PYTHON_RUN.format(overrides=overrides))
        second = bench.start("rl", "other", bench.evaluated_settings(seed=1, algorithm__kl_coefficient=0.1))
        for process in (first, second):
            assert process.finish() == 0, process.stderr
    return bench, first, second


def test_python_does_what_the_command_does(finished_run: Any, two_at_once: Any) -> None:
    undisturbed, _ = finished_run
    bench, process, _ = two_at_once
    assert bench.metrics("python") == undisturbed.metrics("run")
    assert bench.rollouts("python") == undisturbed.rollouts("run")
    assert json.loads(process.stdout.splitlines()[-1])["steps"] == 6


def test_two_runs_at_the_same_time_leave_each_other_alone_whoever_has_the_default_ports(two_at_once: Any) -> None:
    bench, first, second = two_at_once
    assert len(bench.metrics("python")) == len(bench.metrics("other")) == 6
    for process in (first, second):
        assert process.remains() == []


def test_another_seed_gives_other_rollouts(finished_run: Any, two_at_once: Any) -> None:
    undisturbed, _ = finished_run
    bench, *_ = two_at_once
    shared = set(bench.rollouts("other")) & set(undisturbed.rollouts("run"))
    assert len(shared) < len(bench.rollouts("other")) / 4


def test_with_a_kl_term_the_distance_to_the_reference_is_measured(two_at_once: Any) -> None:
    bench, *_ = two_at_once
    distances = [line["policy/kl"] for line in lines(bench.folder / "other/metrics.jsonl")]
    assert distances[0] == pytest.approx(0.0, abs=1e-6), "the reference is the policy before training"
    assert all(np.isfinite(distances)) and distances[-1] > 0


def test_the_critic_warms_up_the_coefficient_is_steered_and_the_reference_is_renewed(finished_vllm_run: Any) -> None:
    metrics = lines(finished_vllm_run[0].folder / "run/metrics.jsonl")
    assert all(line["critic/gradient_norm"] > 0 for line in metrics)
    assert ["policy/gradient_norm" in line for line in metrics] == [False] + 5 * [True]
    coefficients = [line["kl/coefficient"] for line in metrics]
    assert coefficients == sorted(set(coefficients), reverse=True), "the KL is below its target"
    # The policy is its reference when it first learns, in step 2, and again after the renewal at the end of step 3.
    divergences = [line["kl/in_reward"] for line in metrics[1:5]]
    assert divergences[0] == pytest.approx(0, abs=1e-7) == divergences[2]
    assert divergences[1] > 1e-5 < divergences[3]
