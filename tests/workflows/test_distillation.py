"""Distillation as whole runs: from the data by `sft`, and on the student's own answers by `rl`, without a reward."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from slipstream.config.loader import load_config
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.errors import ConfigError, ModelError, SlipstreamError
from slipstream.workflows.checks import check_config
from slipstream.workflows.dry_run import dry_run
from slipstream.workflows.held_out import load_rl_data
from slipstream.workflows.sft import load_sft_data


def make_model(folder: Path, tokenizer: Any, *, seed: int = 0, hidden_size: int = 64, rows: int | None = None) -> Path:
    """A model folder with random weights; `rows` of the head where they are not those of the tokenizer."""
    from slipstream.config.schema import ScratchPolicyConfig
    from slipstream.models.scratch import create_policy

    config = ScratchPolicyConfig(
        hidden_size=hidden_size, layers=2, heads=2, intermediate_size=128, vocabulary_size=320, max_tokens=64
    )
    create_policy(config, tokenizer, seed=seed, folder=folder)
    if rows is not None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.save_pretrained(folder)
    return folder


def teach_sums(folder: Path, tokenizer: Any, rows: Path) -> None:
    """Train the model in `folder` on whole conversations, in this process, until it knows what a sum looks like."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    turns = [json.loads(line) for line in rows.read_text().splitlines()]
    conversations = [
        [{"role": "user", "content": turn["prompt"]}, {"role": "assistant", "content": turn["response"]}]
        for turn in turns
    ]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False)
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(make_workbench: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A fresh student learns from a wider teacher, whose head has padded rows: by `sft`, and by `rl` without a reward.

    The latter is then taken back to its last but one checkpoint and resumed; `undisturbed` is what it was before.
    """
    bench = make_workbench(tmp_path_factory.mktemp("distillation"))
    teacher = make_model(bench.folder / "teacher", tiny_tokenizer, seed=5, hidden_size=128, rows=336)
    teach_sums(teacher, tiny_tokenizer, bench.rows)
    held_out = {
        "evaluation_data.source": str(bench.rows),
        "evaluation_data.rows": 20,
        "evaluation_data.response_key": "response",
        "evaluate_every_steps": 10,
    }
    distilling = bench.sft_settings(steps=80, training__learning_rate=3e-3, teacher__path="./teacher")
    bench.run("sft", "offline", distilling | held_out)
    settings = bench.rl_settings(steps=80, training__learning_rate=3e-3, checkpoint__every_steps=40)
    del settings["reward.function"]
    settings |= {"rollout.groups_per_step": 64, "rollout.samples_per_prompt": 1}
    bench.run("rl", "on_policy", settings | {"algorithm": "distillation", "algorithm.teacher": "./teacher"})
    bench.undisturbed = bench.metrics("on_policy")
    run = bench.folder / "on_policy"
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-000080")
    bench.resume("on_policy")
    return bench


def curve(bench: Any, output: str, name: str) -> list[float]:
    return [line[name] for line in bench.measured(output) if name in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_student_comes_near_its_teacher_on_rows_it_was_not_trained_on(runs: Any) -> None:
    held_out = curve(runs, "offline", "evaluation/divergence")
    first = curve(runs, "offline", "divergence")[0]
    assert len(held_out) == 8
    assert held_out[-1] < first / 20
    assert curve(runs, "offline", "loss")[-1] == pytest.approx(curve(runs, "offline", "divergence")[-1], rel=1e-5)
    assert curve(runs, "offline", "evaluation/cross_entropy")[-1] < curve(runs, "offline", "cross_entropy")[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_students_own_answers_become_likely_to_the_teacher(runs: Any) -> None:
    reverse_kl = curve(runs, "on_policy", "teacher/reverse_kl")
    assert len(reverse_kl) == 80
    assert mean(reverse_kl[-5:]) < mean(reverse_kl[:5]) / 2
    assert curve(runs, "on_policy", "advantage/mean")[0] == pytest.approx(-reverse_kl[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_without_a_reward_reports_none_and_goes_on_bit_for_bit_from_a_checkpoint(runs: Any) -> None:
    metrics = runs.metrics("on_policy")
    assert metrics == runs.undisturbed
    assert not [name for line in metrics for name in line if name.startswith("reward/") and "failures" not in name]
    assert {json.loads(line)["reward"] for line in runs.rollouts("on_policy")} == {None}
    assert (runs.folder / "on_policy/report.html").is_file()


# ---------------------------------------------------------------- what is refused before anything starts


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from slipstream.data.tokenizer import train_tokenizer

    texts = ["Quite another text, with other merges than those of sums: the quick brown fox jumps over the lazy dog."]
    return make_model(tmp_path_factory.mktemp("other") / "model", train_tokenizer(texts, 320))


def sft(policy: Path, rows: Path, **changes: Any) -> SFTConfig:
    keys = {"steps": 1, "output_dir": "out", "model.path": policy, "max_tokens": 64, "data.source": rows}
    keys |= {"data.response_key": "response"} | {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(SFTConfig, None, [f"--{key}={value}" for key, value in keys.items()])


def rl(policy: Path, rows: Path, **changes: Any) -> RLConfig:
    keys = {"steps": 1, "output_dir": "out", "model.path": policy, "data.source": rows, "data.max_prompt_tokens": 32}
    keys |= {"rollout.max_response_tokens": 16, "algorithm": "distillation"}
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(RLConfig, None, [f"--{key}={value}" for key, value in keys.items()])


def configurations(policy: Path, rows: Path, teacher: Path | str) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Both ways to name a teacher, the key of each, and what loads the data of each."""
    return [
        (sft(policy, rows, teacher__path=teacher), "teacher.path", load_sft_data),
        (rl(policy, rows, algorithm__teacher=teacher), "algorithm.teacher", load_rl_data),
    ]


def problem(config: Any, kind: type[SlipstreamError]) -> str:
    with pytest.raises(kind) as caught:
        dry_run(config)
    return str(caught.value)


def test_a_teacher_with_other_tokens_is_refused_in_a_dry_run_and_at_the_start(
    tiny_policy: Path, additions: Path, other_tokens: Path
) -> None:
    for config, key, load_data in configurations(tiny_policy, additions, other_tokens):
        message = problem(config, ModelError)
        assert message.startswith(f"{key}: the tokenizer in {str(other_tokens)!r} has other tokens than that of")
        assert str(tiny_policy) in message
        with pytest.raises(ModelError, match="has other tokens") as caught:
            load_data(config)
        assert {str(other_tokens), str(tiny_policy)} <= set(str(caught.value).replace("'", " ").split())


def test_a_teacher_with_one_more_token_is_refused(
    tiny_policy: Path, additions: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<think>"])
    teacher = make_model(tmp_path / "teacher", tokenizer)
    for config, key, load_data in configurations(tiny_policy, additions, teacher):
        message = problem(config, ModelError)
        assert message.startswith(f"{key}: ") and "different added tokens, such as '<think>'" in message
        with pytest.raises(ModelError, match=r"1 of \d+ differ, such as '<think>'"):
            load_data(config)


def test_a_teacher_may_have_padded_rows_and_must_have_one_for_each_token(
    tiny_policy: Path, additions: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    padded = make_model(tmp_path / "padded", tiny_tokenizer, rows=384)
    for config, _, load_data in configurations(tiny_policy, additions, padded):
        check_config(config)
        load_data(config)
    lacking = make_model(tmp_path / "lacking", tiny_tokenizer, rows=200)
    for config, key, _ in configurations(tiny_policy, additions, lacking):
        assert f"{key}: the model in {str(lacking)!r} has 200 rows" in problem(config, ModelError)


def test_a_teacher_that_is_no_model_or_too_short_is_refused(
    tiny_policy: Path, additions: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    for config, key, _ in configurations(tiny_policy, additions, "./nowhere"):
        assert problem(config, ModelError).startswith(f"{key}: no folder './nowhere'")
    short = make_model(tmp_path / "short", tiny_tokenizer)
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 40}))
    for config, _, _ in configurations(tiny_policy, additions, short):
        assert "exceeds the 40 tokens the teacher takes" in problem(config, ConfigError)


def test_the_keys_that_a_teacher_needs_and_those_it_does_not_read(tiny_policy: Path, additions: Path) -> None:
    for changes, words in (
        ({}, "advantage 'teacher' needs teacher"),
        ({"algorithm": "grpo", "algorithm__teacher": "m"}, "found advantage 'group'"),
        ({"algorithm__teacher": "m", "algorithm__dynamic_sampling": "true"}, "dynamic_sampling changes rewards"),
        ({"algorithm__teacher": "m", "algorithm__shaping__length_penalty": 1}, "shaping changes rewards"),
    ):
        with pytest.raises(ConfigError, match=words):
            rl(tiny_policy, additions, **changes)
    with pytest.raises(ConfigError, match="kl_placement reward changes rewards"):
        rl(
            tiny_policy,
            additions,
            algorithm__teacher="m",
            algorithm__kl_coefficient=1,
            algorithm__kl_placement="reward",
        )
    with pytest.raises(ConfigError, match=r"teacher\.coefficient"):
        sft(tiny_policy, additions, teacher__path="m", teacher__coefficient=0)


def test_a_reward_is_needed_only_for_an_evaluation(tiny_policy: Path, additions: Path) -> None:
    check_config(rl(tiny_policy, additions, algorithm__teacher=tiny_policy))
    evaluated = {"evaluation__data__source": additions, "evaluation__data__max_prompt_tokens": 32}
    config = rl(tiny_policy, additions, algorithm__teacher=tiny_policy, **evaluated)
    assert problem(config, ConfigError).startswith("reward.function: missing")
    check_config(rl(tiny_policy, additions, algorithm__teacher=tiny_policy, reward__function="math", **evaluated))
    wrong = rl(tiny_policy, additions, algorithm__teacher=tiny_policy, reward__function="maths")
    assert "maths" in problem(wrong, ConfigError), "a reward that is given is looked at all the same"


def test_a_pipeline_has_no_teacher(additions: Path, tiny_policy: Path, tmp_path: Path) -> None:
    keys = {
        "output_dir": tmp_path / "out", "sft.steps": 1, "sft.data.source": additions, "sft.max_tokens": 64,
        "sft.data.response_key": "response", "rl.steps": 1, "rl.data.source": additions,
        "rl.data.max_prompt_tokens": 48, "rl.rollout.max_response_tokens": 16, "rl.reward.function": "math",
        "sft.teacher.path": tiny_policy,
    }  # fmt: skip
    config = load_config(PipelineConfig, None, [f"--{key}={value}" for key, value in keys.items()])
    assert problem(config, ConfigError).startswith("sft.teacher.path: a pipeline makes a tokenizer of its own")


def test_the_estimate_counts_the_teacher(
    tiny_policy: Path, additions: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    wide = make_model(tmp_path / "wide", tiny_tokenizer, hidden_size=128)
    from slipstream.workflows.model_facts import read_model_facts

    weights = 4 * read_model_facts(wide).parameters
    for config, _, _ in configurations(tiny_policy, additions, wide):
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
        [stage] = dry_run(config).stages
        assert stage.memory is not None
        parts = next(process.parts for process in stage.memory if process.role == "learner")
        assert parts["teacher"] == weights
    without = dry_run(sft(tiny_policy, additions)).stages[0]
    assert without.memory is not None
    assert all("teacher" not in process.parts for process in without.memory)
