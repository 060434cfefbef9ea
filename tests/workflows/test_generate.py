"""`slipstream generate`: every prompt answered once, the best of it ready for training, and nothing lost on the way."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.generate import GenerateConfig
from slipstream.config.loader import validate_config
from slipstream.errors import ConfigError, DataError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS, SAMPLES, ROUND = 10, 3, 4

HANGING = '''\
"""The reward of the other runs, which hangs at an answer of the second round while it is told to."""

import time
from pathlib import Path

from rewards import digest as plain


def digest(text, control):
    if text.label == "6" and (Path(control) / "hang").exists():
        (Path(control) / "hanging").touch()
        time.sleep(600)
    return plain(text)
'''


def settings(bench: Any, **changes: Any) -> dict[str, Any]:
    given = {
        "model.path": str(bench.policy),
        "model.dtype": "float32",
        "data.source": str(bench.rows),
        "data.rows": PROMPTS,
        "data.max_prompt_tokens": 32,
        "reward.function": "rewards.py:digest",
        "reward.options.control": str(bench.control),
        "reward.timeout_s": 500,
        "rollout.engine": "transformers",
        "rollout.groups_per_step": ROUND,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.max_response_tokens": 24,
        # Digits end an answer: a random policy hardly ever finds its end token.
        "rollout.stop": ["0", "1", "2", "3", "4", "5"],
        "tracking.tensorboard": False,
    }
    return given | {name.replace("__", "."): value for name, value in changes.items()}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def generated(make_workbench: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run in folder `run` of its workbench, and its summary."""
    bench = make_workbench(tmp_path_factory.mktemp("generated"))
    process = bench.run("generate", "run", settings(bench))
    assert process.survivors(limit_s=10) == [] and process.remains() == []
    return bench, json.loads(process.stdout.splitlines()[-1])


def test_every_prompt_has_one_line_in_the_order_of_the_source(generated: Any) -> None:
    bench, _ = generated
    answers, rows = lines(bench.folder / "run/answers.jsonl"), lines(bench.rows)[:PROMPTS]
    assert [answer["row"] for answer in answers] == list(range(PROMPTS))
    assert [(answer["prompt"], answer["label"]) for answer in answers] == [
        (row["prompt"], row["label"]) for row in rows
    ]
    samples = [sample for answer in answers for sample in answer["samples"]]
    assert len(samples) == PROMPTS * SAMPLES
    for sample in samples:
        assert sample["reward"] == sample["parts"]["digest"] == sum(sample["response"].encode()) % 7 / 7
        assert 1 <= sample["tokens"] <= 24 and sample["failure"] is None
    assert {sample["finish_reason"] for sample in samples} == {"stop", "length"}


def test_the_summary_is_that_of_the_answers(generated: Any) -> None:
    bench, summary = generated
    answers = lines(bench.folder / "run/answers.jsonl")
    rewards = [[sample["reward"] for sample in answer["samples"]] for answer in answers]
    assert summary["mean_reward"] == pytest.approx(sum(map(sum, rewards)) / (PROMPTS * SAMPLES))
    assert summary["best_mean_reward"] == pytest.approx(sum(map(max, rewards)) / PROMPTS)
    assert (summary["prompts"], summary["answers"], summary["unscored"]) == (PROMPTS, PROMPTS * SAMPLES, 0)
    for name in ("best", "pairs"):
        assert summary[name] == len(lines(bench.folder / f"run/{name}.jsonl")) > 0
    assert json.loads((bench.folder / "run/summary.json").read_text()) == summary
    assert len(lines(bench.folder / "run/metrics.jsonl")) == 3, "one line a round"


@pytest.mark.parametrize("verb", ["sft", "preference"])
def test_the_selections_are_data_for_training_as_they_are(generated: Any, verb: str) -> None:
    bench, _ = generated
    name = "best.jsonl" if verb == "sft" else "pairs.jsonl"
    shared = {"model.path": str(bench.policy), "model.dtype": "float32", "steps": 1, "batch_size": 1, "max_tokens": 60}
    process = bench.run(verb, f"{verb}-run", shared | {"data.source": f"run/{name}", "tracking.tensorboard": False})
    count = len(lines(bench.folder / "run" / name))
    assert f"{count} of {count} rows kept" in process.stderr


def test_training_renders_a_prompt_with_the_very_tokens_that_were_answered(generated: Any) -> None:
    from slipstream.config.data import DataConfig
    from slipstream.data.conversation import build_sft_examples
    from slipstream.data.prompts import build_prompts
    from slipstream.data.tokenizer import load_tokenizer

    bench, _ = generated
    tokenizer = load_tokenizer(str(bench.policy))
    best = DataConfig(source=str(bench.folder / "run/best.jsonl"))
    asked = {prompt.row: prompt for prompt in build_prompts(DataConfig(source=str(bench.rows)), tokenizer)[0]}
    learned, _ = build_sft_examples(best, tokenizer, 64)
    for row, example in zip(lines(bench.folder / "run/best.jsonl"), learned, strict=True):
        prompt = asked[row["row"]].tokens.tolist()
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert example.loss_mask.tolist().index(True) == len(prompt)


def assert_same_answers(bench: Any, undisturbed: Any) -> None:
    for name in ("answers.jsonl", "best.jsonl", "pairs.jsonl"):
        assert (bench.folder / "run" / name).read_text() == (undisturbed.folder / "run" / name).read_text()
    assert bench.metrics("run") == undisturbed.metrics("run")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL], ids=["control c", "kill -9"])
def test_a_run_that_was_interrupted_goes_on_to_the_same_answers(
    bench: Any, generated: Any, signal_number: signal.Signals
) -> None:
    undisturbed, summary = generated
    (bench.folder / "hanging.py").write_text(HANGING)
    (bench.control / "hang").touch()
    process = bench.start("generate", "run", settings(bench, reward__function="hanging.py:digest"))
    bench.wait_until(process, (bench.control / "hanging").exists, "a hanging reward")
    process.look()
    process.popen.send_signal(signal_number)
    code = process.finish(limit_s=30)
    assert code == (130 if signal_number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in process.stderr
    assert process.survivors(limit_s=15) == [] and process.remains() == []
    bench.release()
    path = bench.folder / "run/answers.jsonl"
    assert len(lines(path)) == ROUND, "the first round was written, the second was under way"
    # As a writer that was killed in the middle of a round leaves it.
    whole = (undisturbed.folder / "run/answers.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join([*whole[: ROUND + 1], whole[ROUND + 1][:20]]))

    resumed = bench.resume("run")
    assert_same_answers(bench, undisturbed)
    again = json.loads(resumed.stdout.splitlines()[-1])
    timed = ("seconds", "run_dir")
    assert {k: v for k, v in again.items() if k not in timed} == {k: v for k, v in summary.items() if k not in timed}


def test_engines_that_are_lost_change_no_answer(bench: Any, generated: Any) -> None:
    """The reward engine while it scores, the rollout engine before the round after that."""
    undisturbed, _ = generated
    (bench.folder / "hanging.py").write_text(HANGING)
    (bench.control / "hang").touch()
    process = bench.start("generate", "run", settings(bench, reward__function="hanging.py:digest"))
    bench.wait_until(process, (bench.control / "hanging").exists, "a hanging reward")
    process.look()
    bench.release()
    for title in ("ray::TransformersEngine", "ray::RewardEngine"):
        process.find(title).kill()
    assert process.finish() == 0, process.stderr
    for name in ("rollout engine 0", "reward engine"):
        assert f"{name} is lost and started anew (time 1 of at most 3)" in process.stderr
    assert process.survivors(limit_s=10) == [] and process.remains() == []
    assert_same_answers(bench, undisturbed)


def test_data_that_changed_meanwhile_is_noticed(bench: Any, generated: Any, write_rows: Callable[..., Path]) -> None:
    """A run on rows of its own that looks interrupted, whose first row then changes."""
    undisturbed, _ = generated
    source = write_rows(bench.folder / "rows.jsonl", lines(bench.rows)[:PROMPTS])
    config = validate_config(
        GenerateConfig,
        {
            "output_dir": "run",
            "model": {"path": str(bench.policy)},
            "data": {"source": str(source)},
            "reward": {"function": "rewards.py:digest"},
            "rollout": {"engine": "transformers", "max_response_tokens": 8, "groups_per_step": ROUND},
        },
    )
    from slipstream.config.loader import dump_config
    from slipstream.errors import RunDirectoryError
    from slipstream.observe.run_directory import RunDirectory
    from slipstream.workflows.resume import resume

    directory = RunDirectory.create(bench.folder / "run", dump_config(config), "generate")
    directory.close()
    answers = lines(undisturbed.folder / "run/answers.jsonl")[:ROUND]
    write_rows(directory.answers_path, [answers[0] | {"prompt": "What is 9 + 9?"}, *answers[1:]])
    with pytest.raises(RunDirectoryError, match=r"answers.jsonl, line 1: .* the data has changed"):
        resume(bench.folder / "run")


def test_without_a_reward_and_without_labels_there_are_only_answers(
    bench: Any, write_rows: Callable[..., Path]
) -> None:
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    rows = write_rows(bench.folder / "rows.jsonl", [{"prompt": messages}, {"prompt": [*messages, *messages]}])
    given = {
        name: value
        for name, value in settings(bench, data__source=str(rows)).items()
        if not name.startswith("reward.") and name != "data.rows"
    }
    process = bench.run("generate", "run", given | {"minimum_reward": 1})
    summary = json.loads(process.stdout.splitlines()[-1])
    assert "mean_reward" not in summary and "best" not in summary
    answers = lines(bench.folder / "run/answers.jsonl")
    assert [answer["prompt"] for answer in answers] == [messages, messages * 2]
    assert {sample["reward"] for answer in answers for sample in answer["samples"]} == {None}
    assert not (bench.folder / "run/best.jsonl").exists()


def test_failed_rewards_are_named_and_cost_no_other_answer(bench: Any) -> None:
    given = settings(
        bench, reward__function="rewards.py:misbehave", reward__timeout_s=1, reward__on_failure="drop_group"
    )
    given = {name: value for name, value in given.items() if not name.startswith("reward.options")}
    process = bench.run(
        "generate", "run", given | {"data.rows": 50, "rollout.groups_per_step": 50, "rollout.samples_per_prompt": 1}
    )
    answers = lines(bench.folder / "run/answers.jsonl")
    failed = {answer["row"] for answer in answers for sample in answer["samples"] if sample["failure"]}
    assert failed == set(range(10, 50)), "prompts whose first operand is 1 to 4"
    assert all(sample["reward"] is None for answer in answers[10:] for sample in answer["samples"])
    assert json.loads(process.stdout.splitlines()[-1])["unscored"] == 40
    assert {row["row"] for row in lines(bench.folder / "run/best.jsonl")} <= set(range(10))


def test_a_reward_that_always_fails_stops_the_run_which_keeps_what_it_has(bench: Any) -> None:
    given = settings(bench, reward__function="rewards.py:always_raise")
    given = {name: value for name, value in given.items() if not name.startswith("reward.options")}
    process = bench.start("generate", "run", given)
    assert process.finish() == 1
    assert "the reward failed for all 12 answers of a round" in process.stderr and "Traceback" not in process.stderr
    assert "go on with: slipstream resume run" in process.stderr
    assert lines(bench.folder / "run/answers.jsonl") == []


def test_a_wrong_configuration_is_refused_before_anything_starts(bench: Any, tmp_path: Path) -> None:
    from slipstream.workflows.generate import generate

    given = {"output_dir": str(tmp_path / "out"), "model": {"path": str(bench.policy)}}
    rollout = {"max_response_tokens": 8}
    with pytest.raises(DataError, match=r"no file or folder '\./none.jsonl'"):
        generate(
            validate_config(
                GenerateConfig,
                given | {"data": {"source": "./none.jsonl", "max_prompt_tokens": 32}, "rollout": rollout},
            )
        )
    data = {"source": str(bench.rows), "max_prompt_tokens": 32}
    with pytest.raises(ConfigError, match=r"rollout.engines \(9\) exceeds rollout.groups_per_step"):
        validate_config(GenerateConfig, given | {"data": data, "rollout": {"engines": 9, "groups_per_step": 8}})
    with pytest.raises(ConfigError, match="there are two reward functions"):
        config = given | {"data": data, "rollout": rollout, "reward": {"function": "math"}}
        generate(validate_config(GenerateConfig, config), reward=lambda text: 1.0)
    assert not (tmp_path / "out").exists()
