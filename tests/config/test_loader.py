"""What a user may write in a recipe and on the command line, and what is said about each mistake."""

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import loader
from slipstream.config.loader import (
    dump_config,
    load_config,
    parse_overrides,
    pipeline_stages,
    resolve_recipe,
    validate_config,
)
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.errors import ConfigError

RL = ["--steps=3", "--output_dir=out", "--model.path=m", "--data.source=d.jsonl", "--reward.function=math"]
PIPELINE = [
    "--output_dir=out",
    "--sft.steps=1",
    "--sft.data.source=d.jsonl",
    "--sft.data.response_key=r",
    "--rl.steps=1",
    "--rl.data.source=d.jsonl",
    "--rl.reward.function=math",
]


def rl(*overrides: str) -> RLConfig:
    return load_config(RLConfig, None, [*RL, *overrides])


def mistake(kind: type, arguments: list[str], path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(kind, path, arguments)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Unknown keys, with the nearest one.
        (
            "--learning_rate 1",
            "learning_rate: unknown key (value 1); did you mean training.learning_rate or critic.learning_rate?",
        ),
        (
            "--training.learning_rat 1e-4",
            "training.learning_rat: unknown key (value 0.0001); did you mean training.learning_rate?",
        ),
        (
            "--training.learning-rate 1",
            "training.learning-rate: unknown key (value 1); did you mean training.learning_rate or "
            "critic.learning_rate?",
        ),
        (
            "--training.kl_coefficient 1",
            "training.kl_coefficient: unknown key (value 1); did you mean algorithm.kl_coefficient?",
        ),
        ("--threads 2", "threads: unknown key (value 2); did you mean rollout.threads or training.threads?"),
        ("--trainin.ranks 2", 'trainin: unknown key (value {"ranks": 2}); did you mean training?'),
        (
            "--checkpoint.frob x",
            "checkpoint.frob: unknown key (value 'x'); keys of checkpoint are every_steps, keep, best_metric",
        ),
        # Wrong types.
        ("--training.learning_rate abc", "training.learning_rate: found 'abc', expected a number above 0"),
        ("--steps 1.5", "steps: found 1.5, expected a whole number of at least 1"),
        ("--steps true", "steps: found true, expected a whole number of at least 1"),
        ("--steps null", "steps: found null, expected a whole number of at least 1"),
        ("--rollout.threads x", "rollout.threads: found 'x', expected a whole number of at least 1, or null"),
        ("--tracking.tensorboard yes", "tracking.tensorboard: found 'yes', expected true or false"),
        ("--rollout.stop x", "rollout.stop: found 'x', expected a list of texts"),
        ("--checkpoint 5", "checkpoint: found 5, expected the keys every_steps, keep, best_metric"),
        ("--data.task_options 5", "data.task_options: found 5, expected a mapping"),
        # Out of range.
        ("--training.learning_rate -1e-4", "training.learning_rate: found -0.0001, expected a number above 0"),
        ("--training.learning_rate .inf", "training.learning_rate: found Infinity, expected a number above 0"),
        ("--rollout.temperature 11", "rollout.temperature: found 11, expected a number above 0 and at most 10"),
        ("--training.zero_stage 7", "training.zero_stage: found 7, expected one of 0, 1, 2, 3"),
        ("--model.dtype fp32", "model.dtype: found 'fp32', expected one of auto, float32, bfloat16"),
        ("--training.betas [0.9]", "training.betas: found [0.9], expected a list of numbers with exactly 2 entries"),
        (
            "--training.betas [0.9,x]",
            "training.betas[1]: found 'x', expected a list of numbers with exactly 2 entries",
        ),
        # Impossible combinations.
        ("--training.betas [0.9,2]", "training.betas must lie in [0, 1), found [0.9, 2.0]"),
        ("--data.prompt_template hi", "data.prompt_template must contain '{prompt}'"),
        (
            "--data.source reasoning_gym:chain_sum",
            "data: a reasoning_gym source needs rows, the number of questions to generate",
        ),
        (
            "--rollout.stop ['a','']",
            "rollout.stop must not hold an empty string: it would end every response before it begins",
        ),
        (
            "--optimizer_steps_per_batch 3",
            "rollout.groups_per_step (16) must be divisible by optimizer_steps_per_batch (3)",
        ),
        (
            "--algorithm ppo --critic.warmup_steps 3",
            "critic.warmup_steps (3) must be less than steps (3): the policy would never be trained",
        ),
        # What is not an override at all.
        (
            "--steps",
            "--steps has no value; expected a whole number of at least 1 "
            "(a value starting with '--' needs --steps=...)",
        ),
        ("--stepz", "--stepz has no value and is not a key; did you mean steps?"),
        ("--steps 1 junk", "unexpected argument 'junk'; expected --section.key value"),
        ("--a..b 1", "'--a..b' is not a key; expected --section.key value"),
        ("--steps.x 5", "steps.x: steps holds 3, which has no keys below it"),
        ("--steps [1", "--steps '[1', line 1, column 3: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_found_and_expected(arguments: str, message: str) -> None:
    assert mistake(RLConfig, [*RL, *arguments.split(" ")]) == message


HELD_OUT = "--evaluation.data.source=e.jsonl"
OTHER = "--evaluation.other_data"


def test_further_held_out_sets_are_named_by_their_keys(tmp_path: Path) -> None:
    recipe = write(tmp_path, "evaluation: {data: {source: e.jsonl}, other_data: {aime: {source: 2024, rows: 3}}}\n")
    config = load_config(RLConfig, recipe, [*RL, f"{OTHER}.math.source", "5", f"{OTHER}.aime.rows=4"])
    assert list(config.evaluation.sets) == ["held-out", "aime", "math"]
    assert config.evaluation.other_data["aime"].source == "2024", "text stays text, whatever it looks like"
    assert (config.evaluation.other_data["math"].source, config.evaluation.other_data["aime"].rows) == ("5", 4)
    assert validate_config(RLConfig, config.model_dump()) == config
    assert list(rl(HELD_OUT, OTHER, "{math: {source: m.jsonl}}").evaluation.sets) == ["held-out", "math"]
    assert rl().evaluation.sets == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            f"{OTHER}.math.source=m {OTHER}.math.promt_key=x",
            "evaluation.other_data.math.promt_key: unknown key (value 'x'); did you mean "
            "evaluation.other_data.math.prompt_key?",
        ),
        (
            f"{OTHER}.math.rows=3",
            "evaluation.other_data.math.source is missing; expected text (Hub dataset name, local file or folder "
            "(jsonl, json, csv, parquet), or 'reasoning_gym:TASK'.), or several sources in mix",
        ),
        (
            f"{OTHER}.math.source=m {OTHER}.math.rows=0",
            "evaluation.other_data.math.rows: found 0, expected a whole number of at least 1, or null",
        ),
        (
            f"{OTHER}.math.source=m {OTHER}.math.prompt_template=hi",
            "evaluation.other_data.math.prompt_template must contain '{prompt}'",
        ),
        (
            f"{OTHER}.math.source",
            f"{OTHER}.math.source has no value; expected text "
            f"(a value starting with '--' needs {OTHER}.math.source=...)",
        ),
        (
            f"{OTHER}.held-out.source=m",
            "evaluation.other_data must not hold a set named 'held-out': evaluation.data is called that",
        ),
    ],
)
def test_a_mistake_in_a_further_held_out_set_is_named_with_the_set(arguments: str, message: str) -> None:
    assert mistake(RLConfig, [*RL, HELD_OUT, *arguments.split(" ")]) == message


@pytest.mark.parametrize("name", ["a/b", "", "a.b", "a b"])
def test_the_name_of_a_set_can_be_part_of_keys_and_metrics(name: str) -> None:
    settings = rl(HELD_OUT).model_dump()
    settings["evaluation"]["other_data"] = {name: {"source": "m.jsonl"}}
    with pytest.raises(
        ConfigError, match=r"evaluation\.other_data must name its sets with letters, digits, '-' and '_'"
    ):
        validate_config(RLConfig, settings)


@pytest.mark.parametrize("value", ["source=m.jsonl", "math=m.jsonl"])
def test_a_set_without_a_section_of_its_own_is_told_what_a_set_has(value: str) -> None:
    assert "found 'm.jsonl', expected the keys source, split" in mistake(RLConfig, [*RL, HELD_OUT, f"{OTHER}.{value}"])


def test_further_sets_need_names_and_a_first_set() -> None:
    text = mistake(RLConfig, [*RL, HELD_OUT, f"{OTHER}=5"])
    assert text.startswith("evaluation.other_data: found 5, expected names, each with the keys source, split")
    text = mistake(RLConfig, [*RL, f"{OTHER}.math.source=m"])
    assert text == "evaluation.other_data needs evaluation.data, the first held-out set"


def test_the_best_metric_is_one_that_the_evaluations_give() -> None:
    sets = [HELD_OUT, f"{OTHER}.math.source=m", "--evaluation.samples_per_prompt=4"]
    for name in ("sampled_accuracy", "greedy_accuracy", "mean_reward", "pass@1", "pass@4", "math/pass@2"):
        assert rl(*sets, f"--checkpoint.best_metric={name}").checkpoint.best_metric == name
    for name in ("pass@8", "pass@3", "maths/pass@2", "math", "held-out/pass@1", "mean_length"):
        text = mistake(RLConfig, [*RL, *sets, f"--checkpoint.best_metric={name}"])
        assert text.startswith("checkpoint.best_metric must be one of sampled_accuracy, greedy_accuracy, mean_reward, ")
        assert "pass@4, math/sampled_accuracy" in text and f"found {name!r}" in text
    text = mistake(RLConfig, [*RL, HELD_OUT, "--checkpoint.best_metric=greedy_acuracy"])
    assert text.endswith("did you mean 'greedy_accuracy'?")


def test_without_accuracies_there_is_no_best_metric() -> None:
    metric = "--checkpoint.best_metric=sampled_accuracy"
    assert mistake(RLConfig, [*RL, metric]).startswith("checkpoint.best_metric needs evaluation.data")
    sft = [*RL[:4], "--data.response_key=r", metric]
    assert mistake(SFTConfig, sft).startswith("checkpoint.best_metric belongs to rl")


def test_missing_keys_are_named_with_their_meaning() -> None:
    lines = mistake(RLConfig, RL[1:]).splitlines()
    assert lines == [
        "steps: missing; expected a whole number of at least 1 (Rollout batches to generate and train on.)"
    ]


def test_of_a_missing_section_its_required_keys_are_named() -> None:
    lines = mistake(RLConfig, [*RL[:2], *RL[3:]]).splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.path"]


def test_a_mistyped_required_key_is_one_line_not_two() -> None:
    assert mistake(RLConfig, ["--step=3", *RL[1:]]) == "step: unknown key (value 3); did you mean steps?"


def test_several_mistakes_are_one_line_each() -> None:
    lines = mistake(RLConfig, [*RL, "--steps=0", "--frob=1", "--training.data_parallel=x"]).splitlines()
    assert [line.split(":")[0] for line in lines] == ["frob", "steps", "training.data_parallel"]


def test_no_message_shows_the_library_behind_the_validation() -> None:
    text = mistake(RLConfig, [*RL, "--steps=x", "--frob=1", "--training.betas=[9, 9]", "--model.dtype=8"])
    assert not any(word in text.lower() for word in ("pydantic", "http", "validation error", "input_type", "literal"))


def test_long_values_are_cut_in_messages() -> None:
    assert len(mistake(RLConfig, [*RL, f"--frob={'x' * 5000}"])) < 400


def test_values_are_yaml() -> None:
    config = rl(
        "--training.learning_rate", "1e-4", "--training.betas", "[0.8, 0.9]", "--rollout.stop=[a, 'b c']",
        "--data.label_key", "null", "--tracking.tensorboard", "false", "--algorithm.clip_high=3",
        "--data.source=reasoning_gym:chain_sum", "--data.rows=4", "--data.task_options.max_terms", "-3",
    )  # fmt: skip
    assert config.training.learning_rate == 1e-4
    assert config.training.betas == [0.8, 0.9]
    assert config.rollout.stop == ["a", "b c"]
    assert config.data.label_key is None
    assert config.tracking.tensorboard is False
    assert config.algorithm.clip_high == 3
    assert config.data.task_options == {"max_terms": -3}


@pytest.mark.parametrize(
    "text", ["5", "007", "1e3", "true", "2024-01-01", "Q: {x}", "a #b", "{prompt}", "[x", "@x", "", "-5", "null "]
)
def test_a_key_that_takes_text_takes_what_was_typed(text: str) -> None:
    assert rl("--data.system_prompt", text).data.system_prompt == text


def test_quotes_around_a_text_are_yaml_quotes() -> None:
    assert rl("--data.system_prompt", r'"a\nb"').data.system_prompt == "a\nb"
    assert rl("--data.system_prompt", "'null'").data.system_prompt == "null"
    assert rl("--data.system_prompt", "null").data.system_prompt is None


def test_a_recipe_may_leave_text_that_looks_like_a_number_unquoted(tmp_path: Path) -> None:
    recipe = write(
        tmp_path, "tracking: {wandb_project: 2024}\ndata: {prompt_key: 007}\nrollout: {stop: [5, x, 1.50]}\n"
    )
    config = load_config(RLConfig, recipe, RL)
    assert config.tracking.wandb_project == "2024"
    assert config.data.prompt_key == "007"
    assert config.rollout.stop == ["5", "x", "1.50"]


def test_a_number_in_quotes_is_not_a_number(tmp_path: Path) -> None:
    recipe = write(tmp_path, "training: {learning_rate: '1e-4'}\n")
    assert mistake(RLConfig, RL, recipe) == "training.learning_rate: found '1e-4', expected a number above 0"


def test_a_later_override_wins_over_an_earlier_one_and_over_the_recipe(tmp_path: Path) -> None:
    recipe = write(tmp_path, "seed: 1\nrollout: {engines: 2}\n")
    config = load_config(RLConfig, recipe, [*RL, "--seed=2", "--seed=3"])
    assert (config.seed, config.rollout.engines) == (3, 2)


def test_an_override_opens_a_section_that_is_null(tmp_path: Path) -> None:
    recipe = write(tmp_path, "evaluation: {data: null}\n")
    config = load_config(RLConfig, recipe, [*RL, "--evaluation.data.source", "e.jsonl"])
    assert config.evaluation.data is not None and config.evaluation.data.source == "e.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "steps: 1\nsteps: 2\n",
            ', line 2, column 1: found duplicate key "steps" with value "2" (original value: "1")',
        ),
        ("a: [1\n", ", line 2, column 1: expected ',' or ']', but got '<stream end>'"),
        ("a: b: c\n", ", line 1, column 5: mapping values are not allowed here"),
        ("- 1\n", ": expected keys and values, found [1]"),
        ("a: &x [*x]\n", ": expected plain text, numbers, lists and mappings: Circular reference detected"),
    ],
)
def test_a_broken_recipe_is_one_line_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    recipe = write(tmp_path, text)
    assert mistake(RLConfig, RL, recipe) == f"{recipe}{message}"


def test_a_recipe_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(b"a: \xff\xfe")
    assert mistake(RLConfig, RL, recipe) == f"{recipe}: not UTF-8 text (byte 3); expected a YAML file"
    recipe.write_bytes(b"a: \x00")
    assert mistake(RLConfig, RL, recipe).startswith(f"{recipe}: not valid YAML: ")


def test_an_empty_recipe_is_a_recipe_without_keys(tmp_path: Path) -> None:
    assert load_config(RLConfig, write(tmp_path, "# nothing\n"), RL) == rl()


def test_keys_that_are_no_text_are_unknown_keys() -> None:
    with pytest.raises(ConfigError, match=r"^\[5\]: unknown key"):
        validate_config(RLConfig, {**rl().model_dump(), 5: 1})  # type: ignore[dict-item]


TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=30)
CONFIGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1 << 40),
        "steps": st.integers(1, 1 << 40),
        "data.system_prompt": TEXTS | st.none(),
        "data.prompt_key": TEXTS,
        "data.prompt_template": TEXTS.map(lambda text: text + "{prompt}"),
        "training.learning_rate": st.floats(0, 1e300, exclude_min=True),
        "training.betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)).map(list),
        "rollout.stop": st.lists(TEXTS.filter(bool), max_size=3),
        "reward.options": st.dictionaries(TEXTS, TEXTS | st.integers() | st.booleans() | st.none(), max_size=3),
    }
)


@settings(deadline=None)
@given(CONFIGS)
def test_a_dumped_configuration_loads_to_an_equal_one(tmp_path_factory: pytest.TempPathFactory, values: dict) -> None:
    mapping: dict[str, Any] = rl().model_dump()
    for path, value in values.items():
        loader._set(mapping, path, value)
    config = validate_config(RLConfig, mapping)
    recipe = tmp_path_factory.mktemp("dump", numbered=True) / "config.yaml"
    recipe.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(RLConfig, recipe, []) == config


@settings(deadline=None)
@given(
    rate=st.floats(1e-300, 1e300),
    seed=st.integers(0, 1 << 60),
    text=st.text(string.printable, max_size=20).filter(lambda text: text != "null" and text[:1] not in "\"'"),
    as_one_word=st.booleans(),
)
def test_overrides_arrive_as_they_were_typed(rate: float, seed: int, text: str, as_one_word: bool) -> None:
    pairs = {"training.learning_rate": repr(rate), "seed": str(seed), "data.system_prompt": text}
    arguments = []
    for key, value in pairs.items():
        one_word = as_one_word or value.startswith("--")
        arguments += [f"--{key}={value}"] if one_word else [f"--{key}", value]
    config = rl(*arguments)
    assert (config.training.learning_rate, config.seed, config.data.system_prompt) == (rate, seed, text)


def test_overrides_are_split_at_the_first_equals_sign() -> None:
    assert parse_overrides(RLConfig, ["--a.b=c=d", "--e", "f=g"]) == [("a.b", "c=d"), ("e", "f=g")]


def test_the_stages_of_a_pipeline_feed_each_other() -> None:
    config = load_config(PipelineConfig, None, [*PIPELINE, "--seed=7", "--rl.training.learning_rate", "1e-4"])
    stages = pipeline_stages(config)
    sft, reinforcement = stages["sft"], stages["rl"]
    assert isinstance(sft, SFTConfig) and isinstance(reinforcement, RLConfig)
    assert (sft.seed, sft.output_dir, sft.model.path) == (7, "out/sft", "out/policy")
    assert (reinforcement.seed, reinforcement.output_dir) == (7, "out/rl")
    assert reinforcement.model.path == "out/sft/export"
    assert reinforcement.training.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--rl.steps=0", "rl.steps: found 0, expected a whole number of at least 1"),
        (
            "--sft.training.learning_rat=1",
            "sft.training.learning_rat: unknown key (value 1); did you mean sft.training.learning_rate?",
        ),
        (
            "--learning_rate=1",
            "learning_rate: unknown key (value 1); did you mean sft.training.learning_rate or "
            "reward_model.training.learning_rate?",
        ),
        ("--rl.training.betas=[1, 2]", "rl.training.betas must lie in [0, 1), found [1.0, 2.0]"),
        (
            "--rl.optimizer_steps_per_batch=3",
            "rl: rollout.groups_per_step (16) must be divisible by optimizer_steps_per_batch (3)",
        ),
        ("--rl.seed=1", "rl.seed: a stage's seed is set by the pipeline's own seed; remove it from rl"),
        (
            "--rl.model.path=x",
            "rl.model.path: a stage's model.path is made by an earlier stage; remove it from rl",
        ),
        ("--rl.model=5", "rl.model.path: rl.model holds 5, which has no keys below it"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_stage_is_named_with_the_stage(argument: str, message: str) -> None:
    assert mistake(PipelineConfig, [*PIPELINE, argument]) == message


def test_a_recipe_is_found_as_a_path_or_by_the_bare_name_of_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = write(tmp_path, "steps: 1")
    assert resolve_recipe(str(own)) == own
    assert resolve_recipe("demo") == resolve_recipe("demo.yaml")
    assert resolve_recipe("demo").is_file()
    (tmp_path / "demo").mkdir()
    assert resolve_recipe("demo").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demoo", r"no recipe 'demoo': no such file, and the recipes shipped are .*demo.*; did you mean demo\?"),
        ("some/where.yaml", r"no recipe 'some/where.yaml': no such file"),
        ("/tmp", r"recipe '/tmp' is a folder; expected a YAML file"),
    ],
)
def test_an_unknown_recipe_is_told_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_recipe(name)


def test_a_section_that_is_missing_is_named_even_where_none_of_its_keys_must_be_given() -> None:
    base = ["--steps=1", "--output_dir=o", "--model.path=m"]
    message = mistake(SFTConfig, base)
    assert message.startswith("data: missing; expected the keys source, split, ")
    assert mistake(SFTConfig, [*base, "--dat.source=x"]) == (
        'dat: unknown key (value {"source": "x"}); did you mean data?'
    )


def test_the_home_folder_may_be_written_as_a_tilde_wherever_a_path_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves the tilde of `--output_dir=~/run` as it is, and nobody ever expands that of a recipe."""
    monkeypatch.setenv("HOME", "/home/me")
    recipe = write(tmp_path, "data: {mix: {one: {source: ~/one.jsonl}, two: {source: reasoning_gym:x, rows: 1}}}")
    given = ["--steps=1", "--output_dir=~/run", "--model.path=~/model", "--reward.model=~/scorer"]
    config = load_config(RLConfig, recipe, [*given, "--algorithm=ppo", "--critic.path=~/critic"])
    assert (config.output_dir, config.model.path) == ("/home/me/run", "/home/me/model")
    assert (config.reward.model, config.critic.path) == ("/home/me/scorer", "/home/me/critic")
    assert [part.source for part in config.data.parts.values()] == ["/home/me/one.jsonl", "reasoning_gym:x"]
    assert load_config(RLConfig, write(tmp_path, dump_config(config)), []) == config
    pipeline = load_config(PipelineConfig, None, [*PIPELINE, "--output_dir=~/all", "--sft.data.source=~/d.jsonl"])
    assert pipeline_stages(pipeline)["rl"].model.path == "/home/me/all/sft/export"
    assert pipeline_stages(pipeline)["sft"].data.source == "/home/me/d.jsonl"
