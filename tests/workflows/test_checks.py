"""What is refused before anything starts, and in which words."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loader import dump_config, load_config
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig
from slipstream.errors import ConfigError, DataError, ModelError, RunDirectoryError, SlipstreamError
from slipstream.workflows import checks
from slipstream.workflows.checks import check_config, check_output_dir, count_rows, reasoning_gym_tasks

MODEL_CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def write_model(folder: Path) -> Path:
    """A folder with everything a check looks at and weights of ten numbers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2, 5], "data_offsets": [0, 40]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(40))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    (tmp_path / "s.jsonl").write_text('{"prompt": "1+1", "response": "2"}\n')
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1", "chosen": "2", "rejected": "3"}\n')
    (tmp_path / "rewards.py").write_text("def score(text):\n    return 1.0\n")
    return tmp_path


def rl(*overrides: str) -> RLConfig:
    base = [
        "--steps=2", "--output_dir=out", "--model.path=./model", "--data.source=d.jsonl",
        "--reward.function=rewards.py:score", "--data.max_prompt_tokens=64", "--rollout.max_response_tokens=64",
    ]  # fmt: skip
    return load_config(RLConfig, None, [*base, *overrides])


def sft(*overrides: str) -> SFTConfig:
    base = ["--steps=2", "--output_dir=out", "--model.path=./model", "--data.source=s.jsonl", "--max_tokens=64"]
    return load_config(SFTConfig, None, [*base, "--data.response_key=response", *overrides])


def preferences(*overrides: str) -> RewardModelConfig:
    base = ["--steps=2", "--output_dir=out", "--model.path=./model", "--data.source=p.jsonl", "--max_tokens=64"]
    return load_config(RewardModelConfig, None, [*base, *overrides])


def direct_preferences(*overrides: str) -> PreferenceConfig:
    base = ["--steps=2", "--output_dir=out", "--model.path=./model", "--data.source=p.jsonl", "--max_tokens=64"]
    return load_config(PreferenceConfig, None, [*base, *overrides])


def pipeline(*overrides: str) -> PipelineConfig:
    base = [
        "--output_dir=out", "--policy.max_tokens=64", "--sft.steps=1", "--sft.data.source=s.jsonl",
        "--sft.data.response_key=response", "--sft.max_tokens=64", "--rl.steps=1", "--rl.data.source=d.jsonl",
        "--rl.data.max_prompt_tokens=48", "--rl.rollout.max_response_tokens=16", "--rl.reward.function=math",
    ]  # fmt: skip
    return load_config(PipelineConfig, None, [*base, *overrides])


def evaluation(*overrides: str) -> EvaluateConfig:
    base = [
        "--output_dir=out", "--model.path=./model", "--evaluation.data.source=d.jsonl", "--reward.function=math",
        "--evaluation.data.max_prompt_tokens=64", "--rollout.max_response_tokens=64",
    ]  # fmt: skip
    return load_config(EvaluateConfig, None, [*base, *overrides])


def problem(config: Any, kind: type[SlipstreamError]) -> str:
    with pytest.raises(kind) as caught:
        check_config(config)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize("make", [rl, sft, preferences, direct_preferences, pipeline, evaluation])
def test_a_sound_configuration_passes_and_leaves_nothing_behind(files: Path, make: Callable[[], Any]) -> None:
    before = sorted(files.rglob("*"))
    check_config(make())
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; expected a Hugging Face model folder"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights; expected *.safetensors or"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer; expected one of tokenizer.json"),
        (
            lambda folder: (folder / "chat_template.jinja").unlink(),
            "has no chat template; use a chat model, or set data.apply_chat_template false",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: "),
        (lambda folder: (folder / "config.json").write_text("{}"), "lacks hidden_size"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "is no safetensors file"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
            "is cut off: ",
        ),
    ],
)
def test_a_model_folder_that_lacks_something_is_refused(
    files: Path, break_it: Callable[[Path], object], message: str
) -> None:
    break_it(files / "model")
    text = problem(rl(), ModelError)
    assert text.startswith("model.path: ") and message in text


@pytest.mark.parametrize("make", [rl, sft])
def test_weights_of_four_bits_are_refused_for_training_with_the_way_out(files: Path, make: Callable[[], Any]) -> None:
    file = files / "model" / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(
        json.dumps(settings | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    found = problem(make(), ModelError)
    assert found.startswith("model.path: the weights of") and "QLoRA" in found and "model.lora" in found
    file.write_text(json.dumps(settings | {"quantization_config": {"quant_method": "mxfp4"}}))
    check_config(make())


def test_a_chat_template_may_stand_in_the_tokenizer_configuration(files: Path) -> None:
    (files / "model" / "chat_template.jinja").unlink()
    (files / "model" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check_config(rl())


def test_without_chat_template_a_plain_prompt_is_fine(files: Path) -> None:
    (files / "model" / "chat_template.jinja").unlink()
    check_config(rl("--data.apply_chat_template=false"))


def test_a_model_that_can_only_be_a_missing_folder_is_refused_and_a_hub_name_is_left_to_load_time(files: Path) -> None:
    assert "no folder './modle'" in problem(rl("--model.path=./modle"), ModelError)
    check_config(rl("--model.path=some-organisation/some-model"))


def write_reward_model(files: Path, **settings: Any) -> None:
    """In `./scorer`, a folder as `slipstream reward-model` exports it, with other settings in its config.json."""
    folder = write_model(files / "scorer")
    known = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG | known | settings))


@pytest.mark.parametrize("make", [rl, evaluation])
def test_a_reward_model_may_score_alone_or_beside_a_function(files: Path, make: Callable[..., Any]) -> None:
    write_reward_model(files, score_moments={"mean": 0.0, "std": 1.0})
    for function in ("math", "null"):
        check_config(make("--reward.model=./scorer", f"--reward.function={function}"))
    check_config(make("--reward.model=./scorer", "--reward.normalize_model_scores=true"))
    check_config(make("--reward.model=some-organisation/some-model", "--reward.function=null"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "reward.model: './scorer' is LlamaForCausalLM, no reward model; train",
        ),
        ({"id2label": None}, "reward.model: './scorer' is a classifier with 2 labels; a reward model has one"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "reward.model: './scorer' is a classifier with 3 labels"),
        ({}, "reward.normalize_model_scores: './scorer' has no score_moments in its config.json; train it with"),
    ],
)
def test_a_folder_that_holds_no_reward_model_is_refused(files: Path, settings: dict[str, Any], message: str) -> None:
    write_reward_model(files, **settings)
    config = rl("--reward.model=./scorer", "--reward.normalize_model_scores=true")
    assert problem(config, ModelError).startswith(message)


def test_a_reward_model_that_cannot_read_what_the_policy_writes_is_refused(files: Path) -> None:
    assert problem(rl("--reward.model=./nowhere"), ModelError).startswith("reward.model: no folder './nowhere'")
    write_reward_model(files, max_position_embeddings=127)
    assert "= 128 exceeds the 127 tokens the reward model takes" in problem(rl("--reward.model=./scorer"), ConfigError)
    for name, vocabulary in (("model", {"a": 0}), ("scorer", {"b": 0})):
        (files / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    text = problem(rl("--reward.model=./scorer"), ModelError)
    assert text.startswith("reward.model: the tokenizer in './scorer' has other tokens than that of model.path")


def test_without_function_or_model_there_is_no_reward_and_nothing_to_normalize(files: Path) -> None:
    assert problem(rl("--reward.function=null"), ConfigError).startswith("reward.function: missing; expected")
    text = problem(rl("--reward.normalize_model_scores=true"), ConfigError)
    assert text.startswith("reward.normalize_model_scores needs reward.model")


def test_a_folder_for_the_critic_is_looked_at_where_there_is_a_critic(files: Path) -> None:
    (files / "empty").mkdir()
    check_config(rl("--critic.path=./empty"))
    with pytest.raises(ModelError, match=r"^critic\.path: folder './empty' has no config\.json"):
        check_config(rl("--algorithm=ppo", "--critic.path=./empty"))
    with pytest.raises(ModelError, match=r"^rl\.critic\.path: no folder './nowhere'"):
        check_config(pipeline("--rl.algorithm=ppo", "--rl.critic.path=./nowhere"))


def test_a_critic_must_read_the_tokens_of_the_policy_and_as_many(files: Path) -> None:
    critic = write_model(files / "critic")
    settings = ["--algorithm=ppo", "--critic.path=./critic"]
    for folder, vocabulary in ((files / "model", {"a": 0}), (critic, {"a": 0})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    check_config(rl(*settings))
    (critic / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    with pytest.raises(ModelError, match=r"^critic\.path: the tokenizer in './critic' has other tokens"):
        check_config(rl(*settings))
    (critic / "tokenizer.json").unlink()
    (critic / "config.json").write_text(json.dumps(MODEL_CONFIG | {"max_position_embeddings": 100}))
    with pytest.raises(ConfigError, match=r"= 128 exceeds the 100 tokens the critic takes"):
        check_config(rl(*settings))


def test_a_gguf_file_is_told_how_it_becomes_a_folder(files: Path) -> None:
    (files / "model.gguf").write_bytes(b"GGUF")
    assert "slipstream import-gguf model.gguf FOLDER" in problem(rl("--model.path=model.gguf"), ModelError)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: rl("--rollout.max_response_tokens=65"),
            "data.max_prompt_tokens (64) + rollout.max_response_tokens (65) = 129 exceeds the 128 tokens the model "
            "takes (max_position_embeddings)",
        ),
        (
            lambda: rl("--evaluation.data.source=d.jsonl"),
            "evaluation.data.max_prompt_tokens (512) + rollout.max_response_tokens (64) = 576 exceeds the 128 tokens "
            "the model takes (max_position_embeddings)",
        ),
        (
            lambda: evaluation("--evaluation.other_data.math.source=d.jsonl"),
            "evaluation.other_data.math.max_prompt_tokens (512) + rollout.max_response_tokens (64) = 576 exceeds the "
            "128 tokens the model takes (max_position_embeddings)",
        ),
        (
            lambda: sft("--max_tokens=129"),
            "max_tokens (129) exceeds the 128 tokens the model takes (max_position_embeddings)",
        ),
        (
            lambda: pipeline("--sft.max_tokens=65"),
            "sft.max_tokens (65) exceeds the 64 tokens the model takes (max_position_embeddings)",
        ),
        (
            lambda: pipeline("--rl.rollout.max_response_tokens=17"),
            "rl.data.max_prompt_tokens (48) + rl.rollout.max_response_tokens (17) = 65 exceeds the 64 tokens the model "
            "takes (max_position_embeddings)",
        ),
    ],
)
def test_sequences_must_fit_the_model(files: Path, config: Callable[[], Any], message: str) -> None:
    assert problem(config(), ConfigError) == message


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ("", [], ["data.source", "holds no rows"]),
        ("{not json}\n", [], ["d.jsonl, line 1", "not valid JSON"]),
        (
            '{"promt": "x", "label": "2"}\n',
            [],
            ["data.prompt_key", "Looked for prompt", "columns found: label, promt", "is it 'promt'?"],
        ),
        ('{"prompt": "x"}\n', [], ["data.label_key", "columns found: prompt", "or to null"]),
    ],
)
def test_data_that_cannot_be_used_is_refused(files: Path, content: str, arguments: list[str], words: list[str]) -> None:
    (files / "d.jsonl").write_text(content)
    text = problem(rl(*arguments), DataError)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (lambda: rl("--data.source=./x.jsonl"), "data.source"),
        (
            lambda: rl("--evaluation.data.source=x.jsonl", "--evaluation.data.max_prompt_tokens=9"),
            "evaluation.data.source",
        ),
        (lambda: sft("--evaluation_data.source=x.jsonl"), "evaluation_data.source"),
        (lambda: preferences("--evaluation_data.source=x.jsonl"), "evaluation_data.source"),
        (lambda: preferences("--data.rejected_key=x"), "data.rejected_key"),
        (lambda: pipeline("--rl.data.source=x.jsonl"), "rl.data.source"),
        (lambda: pipeline("--sft.data.prompt_key=x"), "sft.data.prompt_key"),
        (lambda: evaluation("--evaluation.data.label_key=x"), "evaluation.data.label_key"),
        (
            lambda: evaluation(
                "--evaluation.other_data.math.source=d.jsonl",
                "--evaluation.other_data.math.label_key=x",
                "--evaluation.other_data.math.max_prompt_tokens=9",
            ),
            "evaluation.other_data.math.label_key",
        ),
    ],
)
def test_a_problem_with_data_names_the_section_it_is_in(files: Path, config: Callable[[], Any], key: str) -> None:
    assert problem(config(), DataError).startswith(f"{key}: ")


def test_of_a_large_file_only_the_first_rows_are_read(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "WHOLE_FILE_BYTES", 100)
    monkeypatch.setattr(checks, "SAMPLE_BYTES", 200)
    good = '{"prompt": "1+1", "label": "2"}\n'
    (files / "d.jsonl").write_text(good * 100 + "{not json}\n")
    check_config(rl())
    (files / "d.jsonl").write_text('{"problem": "1+1", "label": "2"}\n' * 100)
    assert "data.prompt_key" in problem(rl(), DataError)
    (files / "d.jsonl").write_text("{not json}\n" + good * 100)
    assert "d.jsonl, line 1: not valid JSON" in problem(rl(), DataError)


def test_a_hub_data_set_is_left_to_load_time(files: Path) -> None:
    check_config(rl("--data.source=openai/gsm8k"))


def test_a_mistyped_task_gets_the_nearest_one_without_importing_the_package(files: Path) -> None:
    check_config(rl("--data.source=reasoning_gym:chain_sum", "--data.rows=5"))
    text = problem(rl("--data.source=reasoning_gym:chain_sums", "--data.rows=5"), DataError)
    assert text.startswith("data.source: reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'?")
    other = ["--data.source=reasoning_gym:chain_sum", "--data.rows=5", "--data.prompt_key=prompt"]
    assert "data.prompt_key" in problem(rl(*other), DataError)


@pytest.mark.slow
def test_the_tasks_read_from_the_source_are_those_the_package_registers() -> None:
    from reasoning_gym.factory import DATASETS

    assert set(reasoning_gym_tasks()) == set(DATASETS)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("maths", "did you mean 'math'?"),
        ("rewards.py:scroe", "did you mean 'score'?"),
        ("nowhere.py:score", "there is no file"),
        ("no_such_module:score", "there is no module"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(files: Path, function: str, words: str) -> None:
    text = problem(rl(f"--reward.function={function}"), ConfigError)
    assert text.startswith("reward.function") and words in text
    text = problem(pipeline(f"--rl.reward.function={function}"), ConfigError)
    assert text.startswith("rl.reward.function") and words in text


@pytest.mark.parametrize("key", ["advantage", "policy_loss", "shaping.function"])
def test_a_function_of_the_algorithm_that_cannot_be_found_is_refused(files: Path, key: str) -> None:
    check_config(rl(f"--algorithm.{key}=rewards.py:score"))
    text = problem(rl(f"--algorithm.{key}=rewards.py:scroe"), ConfigError)
    assert text.startswith(f"algorithm.{key} 'rewards.py:scroe'") and "did you mean 'score'?" in text
    text = problem(pipeline(f"--rl.algorithm.{key}=nowhere.py:score"), ConfigError)
    assert text.startswith(f"rl.algorithm.{key} 'nowhere.py:score': there is no file")


def test_a_reward_given_from_python_takes_the_place_of_a_named_one(files: Path) -> None:
    config = rl("--reward.function=null")
    assert problem(config, ConfigError).startswith("reward.function: missing; expected 'module:function'")
    check_config(config, reward=lambda text: 1.0)


def test_a_service_takes_the_place_of_a_function(files: Path) -> None:
    check_config(rl("--reward.function=null", "--reward.urls=[http://127.0.0.1:8000/score, https://rewards.example]"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--reward.urls=[http://127.0.0.1:8000]"], "reward: there are both a function and urls"),
        (["--reward.urls=[ftp://a/b]", "--reward.function=null"], "such as http://127.0.0.1:8000/score, found 'ftp://"),
        (["--reward.urls=[localhost:8000]", "--reward.function=null"], "found 'localhost:8000'"),
        (["--reward.urls=['http://a:x']", "--reward.function=null"], "found 'http://a:x'"),
        (["--reward.urls=['http://me:secret@a/']", "--reward.function=null"], "SLIPSTREAM_REWARD_TOKEN"),
        (["--reward.urls=['http://a/?key=1']", "--reward.function=null"], "(found one at a)"),
        (
            ["--reward.urls=[http://a]", "--reward.function=null", "--reward.options.x=1"],
            "options are passed to a function",
        ),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(files: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rl(*overrides)
    assert words in str(caught.value)


def test_an_output_folder_with_another_run_names_the_keys_that_differ(files: Path) -> None:
    (files / "out").mkdir()
    (files / "out" / "config.yaml").write_text(dump_config(rl()))
    check_output_dir(rl("--seed=5"))  # nothing was done yet, so nothing would be lost
    (files / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    text = problem(rl("--seed=5", "--training.learning_rate=1e-3"), RunDirectoryError)
    assert text == (
        "output_dir out holds a run with another configuration (seed: 0 there, 5 here; "
        "training.learning_rate: 1e-06 there, 0.001 here); choose another output_dir"
    )


def test_an_output_folder_with_the_same_run_is_told_to_resume_or_that_it_is_finished(files: Path) -> None:
    (files / "out").mkdir()
    (files / "out" / "config.yaml").write_text(dump_config(rl()))
    (files / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "go on with `slipstream resume out`" in problem(rl(), RunDirectoryError)
    (files / "out" / "summary.json").write_text("{}")
    assert problem(rl(), RunDirectoryError).startswith("output_dir out holds this very run, finished")


def test_a_folder_with_something_else_in_it_is_refused(files: Path) -> None:
    (files / "thesis").mkdir()
    (files / "thesis" / "chapter.tex").write_text("...")
    assert "is neither empty nor a run directory" in problem(rl("--output_dir=thesis"), RunDirectoryError)


def test_an_output_folder_that_cannot_be_made_is_refused(files: Path) -> None:
    assert problem(rl("--output_dir=d.jsonl"), RunDirectoryError) == (
        "output_dir d.jsonl is a file; choose another output_dir"
    )
    assert "cannot be made" in problem(rl("--output_dir=d.jsonl/below"), RunDirectoryError)


def test_rows_are_counted_where_that_is_known_without_loading(files: Path) -> None:
    assert count_rows(rl().data) == 1
    assert count_rows(rl("--data.source=reasoning_gym:chain_sum", "--data.rows=7").data) == 7
    assert count_rows(rl("--data.source=openai/gsm8k").data) is None
