"""A dry run says what would happen and makes nothing happen."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.config.loader import load_config
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig
from slipstream.errors import ConfigError, DataError, ModelError
from slipstream.models.tensor_plan import require_equal_pieces
from slipstream.workflows.dry_run import DryRun, Machine, dry_run, measure_work, print_dry_run, visible_gpus

MACHINE = Machine(cpus=2, gpus=0, memory_bytes=8 << 30, native_bfloat16=False)
HEAVY = ("torch", "transformers", "vllm", "deepspeed", "ray", "datasets", "pyarrow", "reasoning_gym", "matplotlib")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1", "label": "2", "response": "2"}\n' * 3)
    return tmp_path


def pipeline(*overrides: str) -> PipelineConfig:
    base = [
        "--output_dir=out", "--sft.steps=5", "--sft.batch_size=4", "--sft.data.source=d.jsonl", "--sft.max_tokens=128",
        "--sft.data.response_key=response", "--rl.steps=6", "--rl.data.source=d.jsonl", "--rl.reward.function=math",
        "--rl.data.max_prompt_tokens=96", "--rl.rollout.max_response_tokens=32",
    ]  # fmt: skip
    return load_config(PipelineConfig, None, [*base, *overrides])


def rl(*overrides: str) -> RLConfig:
    base = ["--steps=6", "--output_dir=out", "--model.path=some/model", "--data.source=d.jsonl"]
    return load_config(RLConfig, None, [*base, "--reward.function=math", *overrides])


def evaluation(source: str, *overrides: str) -> EvaluateConfig:
    base = ["--output_dir=out", "--model.path=some/model", f"--evaluation.data.source={source}"]
    settings = ["--reward.function=math", "--evaluation.samples_per_prompt=4", *overrides]
    return load_config(EvaluateConfig, None, [*base, *settings])


def shown(plan: DryRun) -> str:
    stream = io.StringIO()
    print_dry_run(plan, Console(file=stream, width=200))
    return stream.getvalue()


def test_the_work_of_rl_is_steps_times_groups_times_samples(files: Path) -> None:
    work = measure_work(
        rl("--rollout.groups_per_step=8", "--rollout.samples_per_prompt=4", "--optimizer_steps_per_batch=2")
    )
    assert (work.steps, work.optimizer_steps, work.sequences) == (6, 12, 6 * 8 * 4)
    assert work.max_tokens == 6 * 8 * 4 * (512 + 256)


def test_the_work_of_sft_is_steps_times_batch(files: Path) -> None:
    base = ["--steps=5", "--output_dir=o", "--model.path=some/model", "--data.source=d.jsonl", "--data.response_key=r"]
    work = measure_work(load_config(SFTConfig, None, [*base, "--batch_size=4", "--max_tokens=100"]))
    assert (work.optimizer_steps, work.sequences, work.max_tokens) == (5, 20, 2000)


def test_the_work_of_an_evaluation_is_every_prompt_sampled_and_once_greedy(files: Path) -> None:
    assert measure_work(evaluation("d.jsonl")).sequences == 3 * (4 + 1)
    assert measure_work(evaluation("openai/gsm8k")).sequences is None
    longer = ["--evaluation.other_data.more.source=d.jsonl", "--evaluation.other_data.more.max_prompt_tokens=600"]
    work = measure_work(evaluation("d.jsonl", *longer))
    assert (work.sequences, work.max_tokens) == (6 * (4 + 1), 6 * (4 + 1) * (600 + 256))
    assert measure_work(evaluation("openai/gsm8k", *longer)).sequences is None
    assert "as many sequences as the data has prompts" in shown(dry_run(evaluation("openai/gsm8k"), machine=MACHINE))


def test_a_pipeline_shows_both_stages_resolved_with_work_and_memory(files: Path) -> None:
    text = shown(dry_run(pipeline(), machine=MACHINE))
    assert "output_dir: out/sft" in text and "path: out/sft/export" in text
    assert "Work: 5 steps x 4 sequences = 20 sequences, 5 optimizer steps, at most 2,560 tokens" in text
    assert "rollout engine 0" in text and "reward worker 0" in text and "learner rank 0" in text
    assert "Nothing was started." in text


def test_a_critic_is_shown_with_its_memory(files: Path) -> None:
    plan = dry_run(pipeline("--rl.algorithm=ppo"), machine=MACHINE)
    text = shown(plan)
    assert "critic rank 0" in text
    assert "Learner, critic and rollout engines take turns" in text
    memory = {process.name: process for process in plan.stages[1].memory or []}
    assert memory["critic rank 0"].parts["optimizer"] == memory["learner rank 0"].parts["optimizer"]


def test_a_reward_model_is_shown_with_its_memory(files: Path, tiny_policy: Path, tiny_reward_model: Path) -> None:
    sizes = ["--data.max_prompt_tokens=40", "--rollout.max_response_tokens=16"]
    keys = [f"--model.path={tiny_policy}", f"--reward.model={tiny_reward_model}", "--reward.function=null", *sizes]
    plan = dry_run(rl(*keys), machine=MACHINE)
    text = shown(plan)
    assert "reward engine" in text and "reward worker" not in text
    [scoring] = [process for process in plan.stages[0].memory or [] if process.name == "reward engine"]
    [learner] = [process for process in plan.stages[0].memory or [] if process.name == "learner rank 0"]
    head = 64 * 4
    assert scoring.parts["weights"] == learner.parts["weights"] + head
    absent = dry_run(rl(*keys, "--reward.model=some-organisation/some-model"), machine=MACHINE)
    assert absent.stages[0].memory is None


def test_the_training_of_a_reward_model_is_planned_in_pairs(files: Path) -> None:
    (files / "p.jsonl").write_text('{"prompt": "1+1", "chosen": "2", "rejected": "3"}\n')
    base = ["--steps=5", "--output_dir=o", "--model.path=some/model", "--data.source=p.jsonl", "--batch_size=4"]
    plan = dry_run(load_config(RewardModelConfig, None, [*base, "--max_tokens=100"]), machine=MACHINE)
    [stage] = plan.stages
    assert (stage.name, stage.work.sequences, stage.work.max_tokens) == ("reward-model", 40, 4000)
    assert [actor.role for actor in stage.placement.actors] == ["controller", "learner"]


@pytest.mark.parametrize(("loss", "sequences"), [("dpo", 40), ("kto", 20)])
def test_preference_training_is_planned_in_pairs_or_in_single_answers(files: Path, loss: str, sequences: int) -> None:
    row = '{"prompt": "1+1", "chosen": "2", "rejected": "3", "completion": "2", "label": true}\n'
    (files / "p.jsonl").write_text(row)
    base = ["--steps=5", "--output_dir=o", "--model.path=some/model", "--data.source=p.jsonl", "--batch_size=4"]
    plan = dry_run(load_config(PreferenceConfig, None, [*base, f"--loss={loss}"]), machine=MACHINE)
    [stage] = plan.stages
    assert (stage.name, stage.work.sequences) == ("preference", sequences)
    assert [actor.role for actor in stage.placement.actors] == ["controller", "learner"]


def test_a_model_that_is_not_here_yet_has_no_estimate(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(files / "cache"))
    plan = dry_run(rl(), machine=MACHINE)
    assert plan.stages[0].memory is None
    assert "unknown until downloaded" in shown(plan)


def test_too_little_memory_is_said(files: Path) -> None:
    small = Machine(cpus=2, gpus=0, memory_bytes=1 << 30, native_bfloat16=False)
    assert "more than this machine has" in shown(dry_run(pipeline(), machine=small))
    assert "more than this machine has" not in shown(dry_run(pipeline(), machine=MACHINE))


def test_the_type_of_the_weights_follows_the_machine_unless_it_is_given(files: Path) -> None:
    native = Machine(cpus=2, gpus=0, memory_bytes=8 << 30, native_bfloat16=True)
    assert dry_run(rl(), machine=MACHINE).stages[0].dtype == "float32"
    assert dry_run(rl(), machine=native).stages[0].dtype == "bfloat16"
    assert dry_run(rl("--model.dtype=float32"), machine=native).stages[0].dtype == "float32"


def test_the_estimate_is_json_and_adds_up(files: Path) -> None:
    record = json.loads(json.dumps(dry_run(pipeline(), machine=MACHINE).as_json(), allow_nan=False))
    stage = record["stages"]["rl"]
    assert stage["total_memory_bytes"] == sum(process["total"] for process in stage["memory_bytes"].values())
    assert {actor["role"] for actor in stage["placement"]} == {"controller", "learner", "rollout", "reward"}


def test_what_cannot_run_is_refused(files: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        dry_run(rl("--data.source=./nowhere.jsonl"), machine=MACHINE)
    with pytest.raises(ConfigError, match="need 3 GPUs"):
        dry_run(rl("--training.data_parallel=3"), machine=Machine(cpus=2, gpus=2, memory_bytes=1, native_bfloat16=True))


def test_the_layout_of_several_ranks_is_shown_and_an_impossible_one_refused_with_the_nearest(files: Path) -> None:
    layout = ["--training.data_parallel=2", "--training.sequence_parallel=3"]
    text = shown(dry_run(rl(*layout), machine=MACHINE))
    assert "6 ranks = 2 that learn from different sequences x 3 that share each of them x 1 that share the" in text
    text = shown(dry_run(rl("--training.tensor_parallel=2"), machine=MACHINE))
    assert "2 ranks = 1 that learn from different sequences x 1 that share each of them x 2 that share the" in text
    four = Machine(cpus=4, gpus=4, memory_bytes=1, native_bfloat16=True)
    with pytest.raises(
        ConfigError, match=r"nearest that fits is training\.data_parallel 2, training\.sequence_parallel 2"
    ):
        dry_run(rl(*layout), machine=four)


def test_a_model_that_cannot_be_divided_is_refused_with_what_can(files: Path, tiny_policy: Path) -> None:
    """The policy and the critic of a run, and the policy that a pipeline will make."""
    ppo = [f"--model.path={tiny_policy}", "--data.max_prompt_tokens=32", "--rollout.max_response_tokens=8"]
    dry_run(rl(*ppo, "--training.tensor_parallel=2"), machine=MACHINE)
    with pytest.raises(
        ConfigError, match=r"parallel \(3\) is more than .* that model\.path .* has \(2\).*_parallel 2$"
    ):
        dry_run(rl(*ppo, "--training.tensor_parallel=3"), machine=MACHINE)
    critic = files / "critic"
    shutil.copytree(tiny_policy, critic)
    settings = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(settings | {"num_local_experts": 4}))
    ppo += ["--algorithm=ppo", f"--critic.path={critic}"]
    dry_run(rl(*ppo), machine=MACHINE)
    with pytest.raises(ModelError, match=r"^training\.tensor_parallel: critic\.path .* is of the family llama"):
        dry_run(rl(*ppo, "--training.tensor_parallel=2"), machine=MACHINE)
    with pytest.raises(
        ConfigError, match=r"^rl\.training\.tensor_parallel \(5\) is more than .* the policy of policy\.heads has \(4\)"
    ):
        dry_run(pipeline("--rl.training.tensor_parallel=5"), machine=MACHINE)


def test_workers_that_share_an_engine_are_shown_and_what_they_cannot_share_is_refused(
    files: Path, tiny_policy: Path
) -> None:
    """Two heads and 128 columns in the policy that is here, four heads in the one that a pipeline will make."""
    run = [f"--model.path={tiny_policy}", "--data.max_prompt_tokens=32", "--rollout.max_response_tokens=8"]
    plan = dry_run(rl(*run, "--rollout.engines=2", "--rollout.tensor_parallel=2"), machine=MACHINE)
    text = shown(plan)
    assert "Rollout: 4 workers = 2 that answer different prompts x 2 that share the weights" in text
    assert text.index("rollout engine 0, worker 1") < text.index("rollout engine 1")
    with pytest.raises(
        ConfigError, match=r"^rollout\.tensor_parallel \(3\) does not divide the 2 attention heads .*parallel 2$"
    ):
        dry_run(rl(*run, "--rollout.tensor_parallel=3"), machine=MACHINE)
    with pytest.raises(ConfigError, match=r"^rl\.rollout\.tensor_parallel \(3\) does not divide the 4 .*parallel 2$"):
        dry_run(pipeline("--rl.rollout.tensor_parallel=3"), machine=MACHINE)
    with pytest.raises(ConfigError, match=r"must be 1 for engine transformers.*found 2: set engine to vllm"):
        rl("--rollout.tensor_parallel=2", "--rollout.engine=transformers")


@pytest.mark.parametrize(
    ("settings", "workers", "problem"),
    [
        ({"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}, 2, None),
        ({"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 64}, 8, None),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}, 6, "4 heads of keys and"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 100}, 8, "100 columns of"),
        ({"text_config": {"num_attention_heads": 9, "num_key_value_heads": 3}}, 2, "9 attention heads"),
        ({"n_head": 12}, 4, None),
    ],
)
def test_heads_and_columns_are_shared_equally_and_few_heads_of_keys_are_given_to_several(
    settings: dict, workers: int, problem: str | None
) -> None:
    if problem is None:
        require_equal_pieces(settings, workers, model="m")
        return
    with pytest.raises(ConfigError, match=f"does not divide the {problem}"):
        require_equal_pieces(settings, workers, model="m")


def test_gpus_hidden_from_cuda_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA A\necho NVIDIA B\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["NVIDIA A", "NVIDIA B"]
    for visible, count in (("0", 1), ("0,1", 2), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(visible_gpus()) == count
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []


def test_a_dry_run_imports_nothing_heavy_and_leaves_nothing_behind(files: Path) -> None:
    program = (
        "import sys; from slipstream.cli import main; code = main(sys.argv[1:]);"
        f"sys.stderr.write(repr([m for m in {HEAVY!r} if m in sys.modules])); sys.exit(code)"
    )
    arguments = ["pipeline", "demo", "--dry-run", "--json", "--output_dir", "out"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.endswith("[]")
    assert set(json.loads(done.stdout)["stages"]) == {"sft", "rl"}
    assert [path.name for path in files.iterdir()] == ["d.jsonl"]


def test_an_asynchronous_run_says_how_stale_and_how_corrected(files: Path) -> None:
    text = " ".join(
        shown(dry_run(rl("--rollout.max_staleness=2", "--algorithm.correction_high=3"), machine=MACHINE)).split()
    )
    assert "tokens that are at most 2 publishes old. Correction: truncate (token weights, bounds 0 and 3)." in text
    assert "take turns" not in text
    recomputing = [
        "--rollout.max_staleness=1",
        "--algorithm.correction=mask",
        "--rollout.recompute_cache_on_update=true",
    ]
    text = " ".join(shown(dry_run(rl(*recomputing), machine=MACHINE)).split())
    assert "Correction: mask" in text and "computed anew at a publish" in text
    record = dry_run(rl("--rollout.max_staleness=2"), machine=MACHINE).as_json()
    assert record["stages"]["rl"]["correction"] == "truncate"
    assert dry_run(rl(), machine=MACHINE).as_json()["stages"]["rl"]["correction"] == "none"
    assert "Asynchronous" not in shown(dry_run(rl(), machine=MACHINE))
