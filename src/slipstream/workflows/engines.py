"""Starting the engines a workflow needs: from a configuration to remote engines that are ready to be called."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slipstream.cluster.calls import RemoteEngine, gather
from slipstream.cluster.placement import ActorPlacement, Placement, plan_placement
from slipstream.cluster.restarts import EngineRestarts
from slipstream.cluster.session import ClusterSession, await_engines, await_starts, begin_starts, identify_engines
from slipstream.config.generate import AnsweringConfig, GenerateConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig, SupervisedConfig
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.models.hardware import Hardware, detect_hardware, resolve_dtype
from slipstream.observe.occupancy import Occupancy
from slipstream.observe.timeline import Timeline
from slipstream.rewards.engine import RewardEngine
from slipstream.rewards.model import RewardModelSpec
from slipstream.rollout.group_stream import Generators
from slipstream.rollout.messages import RolloutEngineSpec
from slipstream.training.group import LearnerGroup
from slipstream.weights.plan import ChannelAddress, receiver_indices
from slipstream.weights.publisher import PROBE_TOKENS, WeightPublisher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.training.learner import LearnerSpec
    from slipstream.training.reference import TeacherSpec
    from slipstream.training.roles import RoleName

REWARD_ENGINE_CPUS = 0.01


@dataclass(frozen=True)
class RLEngines:
    """All engines of an RL run, ready. `critic` is None where the advantage needs no values."""

    learner: LearnerGroup
    critic: LearnerGroup | None
    generators: Generators
    publisher: WeightPublisher


def start_rl_engines(
    session: ClusterSession,
    config: RLConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    timeline: Timeline,
    reward: Callable[..., Any] | None,
) -> RLEngines:
    """Start learner, critic, rollout engines and reward engine, all at once, and wait until each is ready.

    Raises EngineError naming the engine that failed or did not start in time.
    """
    hardware = detect_hardware()
    placement = plan_placement(config, hardware.cpus, hardware.gpus)
    start_timeout_s = config.cluster.start_timeout_s
    # In this order: on shared GPUs each kind finds its place beside the ones before it (cluster/placement.py).
    spec = _policy_spec(config, temperature=config.rollout.temperature)
    ranks = _make_ranks(session, placement.of_role("learner"), spec)
    critic_ranks = []
    if config.has_critic:
        critic_ranks = _make_ranks(session, placement.of_role("critic"), _critic_spec(config))
    if hardware.gpus:
        identify_engines([*ranks, *critic_ranks], deadline_s=start_timeout_s)
    rollout_engines = _start_rollout_engines(session, config, placement, hardware)
    reward_engine = _start_reward_engine(session, config, reward, placement=placement, hardware=hardware)
    # These need nobody else, and load while the ranks find each other.
    starts = begin_starts([*rollout_engines, reward_engine])
    for group in filter(None, (ranks, critic_ranks)):
        _agree_to_meet(group, deadline_s=start_timeout_s)
    await_starts([*starts, *begin_starts([*ranks, *critic_ranks])], deadline_s=start_timeout_s)
    for engine in rollout_engines:
        engine.takes_weights = True
    learner = _learner_group(config, ranks)
    generators = _generators(
        session, config, rollout_engines, reward_engine=reward_engine, tokenizer=tokenizer, timeline=timeline
    )
    publisher = WeightPublisher(
        learner,
        rollout_engines,
        open_channel=lambda receivers: _weight_channel(config, session, rollout_engines, ranks, receivers=receivers),
        restarts=generators.restarts,
        bucket_bytes=config.weights.bucket_bytes,
        verify=config.weights.verify,
        dtype=resolve_dtype(config.model.dtype, hardware),
        vocabulary_size=len(tokenizer),
        call_timeout_s=config.cluster.call_timeout_s,
    )
    critic = _learner_group(config, critic_ranks) if critic_ranks else None
    return RLEngines(learner, critic, generators, publisher)


def start_sft_learner(session: ClusterSession, config: SFTConfig) -> LearnerGroup:
    """Start the learner ranks of supervised fine-tuning and wait until each is ready."""
    return _start_supervised_learner(session, config, _policy_spec(config, temperature=1.0))


def start_reward_model_learner(session: ClusterSession, config: RewardModelConfig) -> LearnerGroup:
    """Start the learner ranks of a reward model and wait until each is ready."""
    role: RoleName = "reward_model" if config.supervision == "pairs" else "process_reward_model"
    spec = replace(_policy_spec(config, temperature=1.0), role=role)
    return _start_supervised_learner(session, config, spec, examples_per_unit=config.answers_per_row)


def start_preference_learner(session: ClusterSession, config: PreferenceConfig) -> LearnerGroup:
    """Start the learner ranks of preference training, with a reference if one is to be held, and wait until ready."""
    spec = replace(_policy_spec(config, temperature=1.0), load_reference=config.loads_reference)
    return _start_supervised_learner(session, config, spec, examples_per_unit=config.answers_per_row)


def _start_supervised_learner(
    session: ClusterSession, config: SupervisedConfig, spec: LearnerSpec, *, examples_per_unit: int = 1
) -> LearnerGroup:
    hardware = detect_hardware()
    placement = plan_placement(config, hardware.cpus, hardware.gpus)
    start_timeout_s = config.cluster.start_timeout_s
    ranks = _make_ranks(session, placement.of_role("learner"), spec)
    _agree_to_meet(ranks, deadline_s=start_timeout_s)
    await_engines(ranks, deadline_s=start_timeout_s)
    return _learner_group(config, ranks, examples_per_unit=examples_per_unit)


def start_answering_engines(
    session: ClusterSession,
    config: AnsweringConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    timeline: Timeline,
    reward: Callable[..., Any] | None,
) -> Generators:
    """Start rollout engines, which load the model from disk, and the reward engine; wait until each is ready."""
    hardware = detect_hardware()
    placement = plan_placement(config, hardware.cpus, hardware.gpus)
    rollout_engines = _start_rollout_engines(session, config, placement, hardware)
    reward_engine = _start_reward_engine(session, config, reward, placement=placement, hardware=hardware)
    await_engines(session.engines, deadline_s=config.cluster.start_timeout_s)
    return _generators(
        session, config, rollout_engines, reward_engine=reward_engine, tokenizer=tokenizer, timeline=timeline
    )


def _policy_spec(config: RLConfig | SupervisedConfig, *, temperature: float) -> LearnerSpec:
    """What all ranks of the policy have in common."""
    # Only here: it imports torch, and bad input is to be refused at once.
    from slipstream.training.learner import LearnerSpec

    return LearnerSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        training=config.training,
        temperature=temperature,
        total_optimizer_steps=_optimizer_steps(config, waits_for_critic=True),
        load_reference=isinstance(config, RLConfig) and config.algorithm.kl_coefficient > 0,
        seed=config.seed,
        rank=0,
        activation_checkpointing=config.model.activation_checkpointing,
        router_loss_coefficient=config.model.router_loss_coefficient,
        lora=config.model.lora,
        teacher=_teacher_spec(config),
        timeout_s=config.cluster.call_timeout_s,
    )


def _teacher_spec(config: RLConfig | SupervisedConfig) -> TeacherSpec | None:
    """The teacher beside the policy; None where there is none."""
    from slipstream.training.reference import TeacherSpec

    if isinstance(config, RLConfig) and config.algorithm.teacher is not None:
        return TeacherSpec(config.algorithm.teacher, "algorithm.teacher")
    if isinstance(config, SFTConfig) and config.teacher is not None:
        teacher = config.teacher
        return TeacherSpec(teacher.path, "teacher.path", teacher.divergence, teacher.temperature)
    return None


def _critic_spec(config: RLConfig) -> LearnerSpec:
    """What all ranks of the critic have in common: what it has no keys of its own for is as in the policy."""
    path = config.critic.path
    return replace(
        _policy_spec(config, temperature=1.0),
        role="critic",
        model_path=config.model.path if path is None else path,
        model_key="model.path" if path is None else "critic.path",
        # The critic is not exported, so nobody would see its average.
        training=config.training.model_copy(update={"learning_rate": config.critic.learning_rate, "ema_decay": None}),
        total_optimizer_steps=_optimizer_steps(config, waits_for_critic=False),
        load_reference=False,
        router_loss_coefficient=None,
        lora=None,
        teacher=None,
    )


def _optimizer_steps(config: RLConfig | SupervisedConfig, *, waits_for_critic: bool) -> int:
    """Where the schedule of the learning rate ends. The policy does not learn while the critic warms up."""
    if isinstance(config, SupervisedConfig):
        return config.steps
    waiting = config.critic.warmup_steps if config.has_critic and waits_for_critic else 0
    return max(config.steps - waiting, 1) * config.optimizer_steps_per_batch * config.epochs_per_batch


def _make_ranks(session: ClusterSession, actors: Sequence[ActorPlacement], spec: LearnerSpec) -> list[RemoteEngine]:
    """Make the ranks of one learner; does not wait for their processes."""
    from slipstream.training.learner import LearnerRank

    ranks = []
    for rank, actor in enumerate(actors):
        training = spec.training.model_copy(update={"threads": actor.threads})
        ranks.append(_start_actor(session, actor, LearnerRank, replace(spec, rank=rank, training=training)))
    return ranks


def _agree_to_meet(ranks: list[RemoteEngine], *, deadline_s: float) -> None:
    """Wait until the ranks' processes run. They will meet where rank 0 turned out to be, at a port that is free there.

    `start` is left to the caller.
    """
    identify_engines(ranks, deadline_s=deadline_s)
    meeting_point = _meeting_point(ranks[0], deadline_s=deadline_s)
    for rank in ranks:
        rank.start_arguments = (meeting_point,)


def _meeting_point(rank: RemoteEngine, *, deadline_s: float) -> tuple[str, int]:
    """An address and port that a rank holds open for others to come to."""
    address, port = gather([rank.submit("meeting_point", rank.address)], deadline_s=deadline_s)[0]
    return address, port


def _start_rollout_engines(
    session: ClusterSession, config: RLConfig | AnsweringConfig, placement: Placement, hardware: Hardware
) -> list[RemoteEngine]:
    sources = [] if isinstance(config, GenerateConfig) else list(config.evaluation.sets.values())
    if isinstance(config, RLConfig | GenerateConfig):
        sources.append(config.data)
    longest_prompt = max(data.max_prompt_tokens for data in sources)
    engines = []
    for index, actor in enumerate(placement.of_role("rollout")):
        spec = RolloutEngineSpec(
            model_path=config.model.path,
            dtype=resolve_dtype(config.model.dtype, hardware),
            device=hardware.device,
            max_sequence_tokens=max(longest_prompt + config.rollout.max_response_tokens, PROBE_TOKENS + 2),
            max_concurrent_sequences=config.rollout.max_concurrent_sequences,
            kv_cache_bytes=config.rollout.kv_cache_bytes,
            gpu_memory_share=config.rollout.gpu_memory_share,
            threads=actor.threads,
            seed=config.seed,
            engine_index=index,
            recompute_cache_on_update=config.rollout.recompute_cache_on_update,
            tensor_parallel=config.rollout.tensor_parallel,
        )
        if config.rollout.engine == "vllm":
            from slipstream.rollout.vllm_engine import VLLMEngine, vllm_environment

            environment = vllm_environment(spec)
            if session.temporary_folder is not None:
                # vLLM leaves sockets in the folder for temporary files, and more if it is killed.
                environment["TMPDIR"] = str(session.temporary_folder)
            engines.append(_start_actor(session, actor, VLLMEngine, spec, environment=environment))
        else:
            from slipstream.rollout.transformers_engine import TransformersEngine

            engines.append(_start_actor(session, actor, TransformersEngine, spec))
    return engines


def _start_reward_engine(
    session: ClusterSession,
    config: RLConfig | AnsweringConfig,
    reward: Callable[..., Any] | None,
    *,
    placement: Placement,
    hardware: Hardware,
) -> RemoteEngine:
    from slipstream.rewards.pool import pickle_function

    function = None if reward is None else pickle_function(reward)
    arguments = (config.reward, function, os.getcwd())
    if config.reward.model is None:
        return session.start_engine("reward engine", RewardEngine, *arguments, cpus=REWARD_ENGINE_CPUS)
    [actor] = placement.of_role("reward_model")
    spec = RewardModelSpec(
        path=config.reward.model,
        policy_path=config.model.path,
        dtype=resolve_dtype(config.model.dtype, hardware),
        threads=actor.threads,
        normalize=config.reward.normalize_model_scores,
        step_aggregation=config.reward.step_aggregation,
    )
    # The number of threads is set in the engine: children that run a function inherit the environment.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    return session.start_engine(
        actor.name, RewardEngine, *arguments, spec, cpus=actor.cpus, gpus=actor.gpus, environment=environment
    )


def _start_actor(
    session: ClusterSession,
    actor: ActorPlacement,
    engine_class: type,
    spec: object,
    *,
    environment: dict[str, str] | None = None,
) -> RemoteEngine:
    # Threads that wait give up their core instead of spinning on it: engines take turns on the same cores, and on a
    # machine that has other work to do spinning makes every step several times slower.
    threads = {"OMP_NUM_THREADS": str(actor.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return session.start_engine(
        actor.name, engine_class, spec, cpus=actor.cpus, gpus=actor.gpus, environment=threads | (environment or {})
    )


def _learner_group(
    config: RLConfig | SupervisedConfig, ranks: list[RemoteEngine], *, examples_per_unit: int = 1
) -> LearnerGroup:
    return LearnerGroup(
        ranks,
        tokens_per_micro_batch=config.training.tokens_per_micro_batch,
        call_timeout_s=config.cluster.call_timeout_s,
        examples_per_unit=examples_per_unit,
        share_prompts=config.training.share_prompts,
        sequence_parallel=config.training.sequence_parallel,
        tensor_parallel=config.training.tensor_parallel,
    )


def _generators(
    session: ClusterSession,
    config: RLConfig | AnsweringConfig,
    engines: list[RemoteEngine],
    *,
    reward_engine: RemoteEngine,
    tokenizer: PreTrainedTokenizerBase,
    timeline: Timeline,
) -> Generators:
    return Generators(
        engines=engines,
        reward_engine=reward_engine,
        tokenizer=tokenizer,
        timeline=timeline,
        occupancy=Occupancy(),
        restarts=EngineRestarts(
            session,
            limit=config.cluster.max_engine_restarts,
            start_timeout_s=config.cluster.start_timeout_s,
            timeline=timeline,
        ),
        seed=config.seed,
        call_timeout_s=config.cluster.call_timeout_s,
    )


def _weight_channel(
    config: RLConfig,
    session: ClusterSession,
    engines: list[RemoteEngine],
    ranks: list[RemoteEngine],
    *,
    receivers: Sequence[int],
) -> ChannelAddress:
    """Shared memory where learner and engines see the same, gloo otherwise, to the engines of these indices."""
    kind = config.weights.channel
    if kind == "auto":
        kind = "shared_memory" if {engine.node for engine in engines} == {ranks[0].node} else "gloo"
    host, port = "127.0.0.1", 0
    if kind == "gloo":
        host, port = _meeting_point(ranks[0], deadline_s=config.cluster.start_timeout_s)
    return ChannelAddress(
        kind=kind,
        run_id=session.run_id,
        receivers=receiver_indices(receivers, config.rollout.tensor_parallel),
        host=host,
        port=port,
        timeout_s=config.cluster.call_timeout_s,
        workers_per_engine=config.rollout.tensor_parallel,
    )
