"""What a run would do, said before doing it: resolved configuration, placement, amount of work, memory.

Starts nothing and imports neither torch nor Ray. The placement is the one the run will use; the work and the memory
are upper bounds and estimates, and are called so.
"""

import os
import subprocess
from dataclasses import asdict, dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from slipstream.cluster.placement import Placement, plan_placement
from slipstream.config.algorithm import AlgorithmConfig
from slipstream.config.generate import AnsweringConfig, GenerateConfig
from slipstream.config.keys import show
from slipstream.config.loader import dump_config, pipeline_stages
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.presets import preset_keys
from slipstream.config.reward_model import RewardModelConfig, SupervisedConfig
from slipstream.config.schema import EvaluateConfig, RLConfig, RolloutConfig, SFTConfig, TrainingConfig
from slipstream.workflows.checks import Workflow, check_config, count_rows
from slipstream.workflows.memory_estimate import (
    GIBIBYTE,
    ProcessMemory,
    estimate_memory,
    longest_sequence,
    sequences_per_row,
)
from slipstream.workflows.model_facts import ModelFacts, local_folder, read_model_facts, scratch_model_facts

if TYPE_CHECKING:
    from rich.console import Console

NVIDIA_SMI_TIMEOUT_S = 2.0
SHOWN_BYTES = GIBIBYTE // 20


@dataclass(frozen=True)
class Machine:
    """What a dry run looks at. `memory_bytes` is the whole memory of the machine."""

    cpus: int
    gpus: int
    memory_bytes: int
    native_bfloat16: bool


@dataclass(frozen=True)
class Work:
    """How much a stage will do, at most: `max_tokens` counts every sequence at its longest.

    `sequences` are generated (evaluate, where None means that the number of prompts is only known once they are
    loaded) or trained on (all others). Evaluations during training are not counted.
    """

    steps: int
    optimizer_steps: int
    sequences: int | None
    max_tokens: int | None


@dataclass(frozen=True)
class StagePlan:
    """One workflow of the run; a pipeline has two. `memory` is None where a model is not on this machine yet."""

    name: str
    config: RLConfig | SupervisedConfig | AnsweringConfig
    placement: Placement
    work: Work
    model: ModelFacts | None
    dtype: str
    memory: list[ProcessMemory] | None

    @property
    def total_bytes(self) -> int | None:
        """Memory of all processes together, None if unknown."""
        return None if self.memory is None else sum(process.total_bytes for process in self.memory)


@dataclass(frozen=True)
class DryRun:
    """The answer of `--dry-run`."""

    config: Workflow
    machine: Machine
    stages: tuple[StagePlan, ...]

    def as_json(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            "config": self.config.model_dump(),
            "machine": asdict(self.machine),
            "stages": {stage.name: _stage_as_json(stage) for stage in self.stages},
        }


def dry_run(config: Workflow, *, machine: Machine | None = None) -> DryRun:
    """Check the configuration and work out what a run of it would do on `machine` (default: this one).

    Raises what `check_config` raises, and ConfigError where the placement is impossible.
    """
    check_config(config)
    machine = machine or look_at_machine()
    if isinstance(config, PipelineConfig):
        scratch = scratch_model_facts(config.policy)
        stages = pipeline_stages(config).items()
        return DryRun(config, machine, tuple(_plan(name, stage, machine, scratch) for name, stage in stages))
    folder = local_folder(config.model.path)
    model = None if folder is None else read_model_facts(folder)
    names = {
        RLConfig: "rl",
        SFTConfig: "sft",
        RewardModelConfig: "reward-model",
        PreferenceConfig: "preference",
        EvaluateConfig: "evaluate",
        GenerateConfig: "generate",
    }
    name = names[type(config)]
    return DryRun(config, machine, (_plan(name, config, machine, model),))


def look_at_machine() -> Machine:
    """Cores, memory and GPUs of this machine, without torch."""
    from slipstream.models.hardware import cpu_has_native_bfloat16

    gpus = len(visible_gpus())
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        gpus=gpus,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        native_bfloat16=gpus > 0 or cpu_has_native_bfloat16(),
    )


def visible_gpus() -> list[str]:
    """Names of the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves; empty without the driver."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    names = [line.strip() for line in listing.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    return names[: len([device for device in visible.split(",") if device.strip() not in ("", "-1")])]


def measure_work(config: RLConfig | SupervisedConfig | AnsweringConfig) -> Work:
    """Steps, sequences and the most tokens of a workflow."""
    sequences: int | None
    if isinstance(config, RLConfig):
        steps, optimizer_steps = config.steps, config.steps * config.optimizer_steps_per_batch * config.epochs_per_batch
        sequences = steps * config.rollout.groups_per_step * config.rollout.samples_per_prompt
    elif isinstance(config, SupervisedConfig):
        steps = optimizer_steps = config.steps
        sequences = steps * config.batch_size * sequences_per_row(config)
    elif isinstance(config, GenerateConfig):
        steps, optimizer_steps = 1, 0
        prompts = count_rows(config.data)
        sequences = None if prompts is None else prompts * config.rollout.samples_per_prompt
    else:
        steps, optimizer_steps = 1, 0
        counts = [count_rows(data) for data in config.evaluation.sets.values()]
        known = [count for count in counts if count is not None]
        # Every prompt is answered once more, greedily.
        is_known = len(known) == len(counts)
        sequences = sum(known) * (config.evaluation.samples_per_prompt + 1) if is_known else None
    max_tokens = None if sequences is None else sequences * longest_sequence(config)
    return Work(steps, optimizer_steps, sequences, max_tokens)


def print_dry_run(plan: DryRun, console: "Console") -> None:
    """Show the plan to a person."""
    for stage in plan.stages:
        if isinstance(plan.config, PipelineConfig):
            console.print(f"\n# Stage {stage.name}", style="bold", highlight=False)
        console.print(dump_config(stage.config), highlight=False, markup=False, soft_wrap=True)
        _print_stage(stage, plan.machine, console)
    console.print("Nothing was started.")


def _plan(
    name: str, config: RLConfig | SupervisedConfig | AnsweringConfig, machine: Machine, model: ModelFacts | None
) -> StagePlan:
    placement = plan_placement(config, machine.cpus, machine.gpus)
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if machine.native_bfloat16 else "float32"
    others = {
        "critic": _critic_facts(config, model),
        "reward_model": _reward_model_facts(config, model),
        "teacher": _teacher_facts(config, model),
    }
    memory = None
    if model is not None and None not in others.values():
        memory = estimate_memory(config, placement, model, dtype, **others)
    return StagePlan(name, config, placement, measure_work(config), model, dtype, memory)


def _critic_facts(config: RLConfig | SupervisedConfig | AnsweringConfig, model: ModelFacts | None) -> ModelFacts | None:
    """Facts of the model that a critic starts from: the policy's unless it has one of its own."""
    if not isinstance(config, RLConfig) or not config.has_critic or config.critic.path is None:
        return model
    return _facts_of(config.critic.path)


def _reward_model_facts(
    config: RLConfig | SupervisedConfig | AnsweringConfig, model: ModelFacts | None
) -> ModelFacts | None:
    """Facts of the reward model; the policy's where there is none to estimate."""
    if isinstance(config, SupervisedConfig) or config.reward.model is None:
        return model
    return _facts_of(config.reward.model)


def _teacher_facts(
    config: RLConfig | SupervisedConfig | AnsweringConfig, model: ModelFacts | None
) -> ModelFacts | None:
    """Facts of the teacher; the policy's where there is none to estimate."""
    if isinstance(config, RLConfig) and config.algorithm.teacher is not None:
        return _facts_of(config.algorithm.teacher)
    if isinstance(config, SFTConfig) and config.teacher is not None:
        return _facts_of(config.teacher.path)
    return model


def _facts_of(path: str) -> ModelFacts | None:
    folder = local_folder(path)
    return None if folder is None else read_model_facts(folder)


def _stage_as_json(stage: StagePlan) -> dict[str, Any]:
    memory = None
    if stage.memory is not None:
        memory = {process.name: {**process.parts, "total": process.total_bytes} for process in stage.memory}
    return {
        "config": stage.config.model_dump(),
        "placement": [asdict(actor) for actor in stage.placement.actors],
        "alternating": stage.placement.alternating,
        "correction": stage.config.correction_mode if isinstance(stage.config, RLConfig) else None,
        "work": asdict(stage.work),
        "model": None if stage.model is None else asdict(stage.model),
        "dtype": stage.dtype,
        "memory_bytes": memory,
        "total_memory_bytes": stage.total_bytes,
    }


def _print_stage(stage: StagePlan, machine: Machine, console: "Console") -> None:
    from rich.table import Table

    memory = {process.name: process for process in stage.memory or []}
    table = Table(
        title=f"{stage.name}: placement on {machine.cpus} cores and {machine.gpus} GPUs", title_justify="left"
    )
    table.add_column("process")
    table.add_column("threads", justify="right")
    table.add_column("GPUs", justify="right")
    table.add_column("memory, about", justify="right")
    table.add_column("of which")
    for actor in stage.placement.actors:
        process = memory.pop(actor.name, None)
        gpus = f"{actor.gpus:g}" if actor.gpus else "-"
        table.add_row(actor.name, str(actor.threads), gpus, *_memory_cells(process))
        for name in [name for name in memory if name.startswith(f"{actor.name}, worker ")]:
            table.add_row(name, str(actor.threads), "-", *_memory_cells(memory.pop(name)))
    for process in memory.values():
        table.add_row(process.name, "-", "-", *_memory_cells(process))
    console.print(table)
    if not isinstance(stage.config, AnsweringConfig) and stage.config.training.ranks > 1:
        console.print(_layout_text(stage.config.training), markup=False)
    if isinstance(stage.config, RLConfig | AnsweringConfig) and stage.config.rollout.tensor_parallel > 1:
        console.print(_workers_text(stage.config.rollout), markup=False)
    if isinstance(stage.config, RLConfig):
        console.print(_preset_text(stage.config.algorithm), markup=False)
    if stage.placement.alternating:
        learner = "Learner, critic" if stage.placement.of_role("critic") else "Learner"
        console.print(f"{learner} and rollout engines take turns; each uses the cores while the others wait.")
    elif isinstance(stage.config, RLConfig):
        console.print(_asynchronous_text(stage.config), markup=False)
    console.print(_work_text(stage))
    console.print(_memory_text(stage, machine))


def _memory_cells(process: ProcessMemory | None) -> tuple[str, str]:
    if process is None:
        return "unknown", "the model is not on this machine yet"
    large = sorted(process.parts.items(), key=lambda part: -part[1])[:3]
    shown = [f"{name} {_gibibytes(size)}" for name, size in large if size >= SHOWN_BYTES]
    return _gibibytes(process.total_bytes), ", ".join(shown)


def _layout_text(training: TrainingConfig) -> str:
    """How the ranks of a learner are arranged."""
    return (
        f"Learner: {training.ranks} ranks = {training.data_parallel} that learn from different sequences x "
        f"{training.sequence_parallel} that share each of them x {training.tensor_parallel} that share the weights"
    )


def _workers_text(rollout: RolloutConfig) -> str:
    """How the workers of the rollout engines are arranged."""
    engines, width = rollout.engines, rollout.tensor_parallel
    return (
        f"Rollout: {engines * width} workers = {engines} that answer different prompts x {width} that share the weights"
    )


def _preset_text(algorithm: AlgorithmConfig) -> str:
    """What the preset set, and what the recipe set otherwise."""
    resolved = algorithm.model_dump()
    settings = []
    for path, value in preset_keys(algorithm.preset).items():
        found = reduce(lambda section, name: section[name], path.split("."), resolved)
        settings.append(f"{path} {show(found)}" + ("" if found == value else f" (the preset's is {show(value)})"))
    return f"Preset {algorithm.preset} sets algorithm: {', '.join(settings) or 'nothing but the defaults'}"


def _asynchronous_text(config: RLConfig) -> str:
    """How old samples may be, and what is done about it."""
    algorithm, bound = config.algorithm, config.rollout.max_staleness
    cache = "computed anew" if config.rollout.recompute_cache_on_update else "kept"
    return (
        f"Asynchronous: engines generate while the learner trains, on tokens that are at most {bound} publishes old. "
        f"Correction: {config.correction_mode} ({algorithm.correction_level} weights, bounds "
        f"{algorithm.correction_low:g} and {algorithm.correction_high:g}). The cache of responses under way is {cache} "
        "at a publish."
    )


def _work_text(stage: StagePlan) -> str:
    work = stage.work
    if work.sequences is None:
        return "Work: as many sequences as the data has prompts, once they are loaded"
    return (
        f"Work: {work.steps} steps x {work.sequences // work.steps} sequences = {work.sequences:,} sequences, "
        f"{work.optimizer_steps} optimizer steps, at most {work.max_tokens:,} tokens"
    )


def _memory_text(stage: StagePlan, machine: Machine) -> str:
    if stage.model is None or stage.total_bytes is None:
        return "Model: unknown until downloaded, so no memory estimate"
    exact = "" if stage.model.is_exact else "about "
    text = (
        f"Model: {exact}{stage.model.parameters:,} parameters in {stage.dtype}. Memory: about "
        f"{_gibibytes(stage.total_bytes)} in all, of {_gibibytes(machine.memory_bytes)}"
    )
    if stage.total_bytes > machine.memory_bytes:
        text += ": more than this machine has"
    return text


def _gibibytes(size: int) -> str:
    return f"{size / GIBIBYTE:.1f} GiB"
