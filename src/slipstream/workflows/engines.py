"""Starting the engines a workflow needs: from a configuration to remote engines that are ready to be called."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.cluster.calls import RemoteEngine, gather
from slipstream.cluster.placement import ActorPlacement, Placement, plan_placement
from slipstream.cluster.session import ClusterSession, await_engines, identify_engines
from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig
from slipstream.models.hardware import Hardware, detect_hardware, resolve_dtype
from slipstream.observe.timeline import Timeline
from slipstream.rewards.engine import RewardEngine
from slipstream.rollout.messages import RolloutEngineSpec
from slipstream.rollout.stream import Generators
from slipstream.training.group import LearnerGroup
from slipstream.weights.plan import ChannelAddress
from slipstream.weights.publisher import PROBE_TOKENS, WeightPublisher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWARD_ENGINE_CPUS = 0.01


@dataclass(frozen=True)
class RLEngines:
    """All engines of an RL run, ready."""

    learner: LearnerGroup
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
    """Start learner ranks, rollout engines and reward engine, all at once, and wait until each is ready.

    Raises EngineError naming the engine that failed or did not start in time.
    """
    hardware = detect_hardware()
    placement = plan_placement(config, hardware.cpus, hardware.gpus)
    ranks = _start_learner(session, config, placement, temperature=config.rollout.temperature)
    rollout_engines = _start_rollout_engines(session, config, placement, hardware)
    reward_engine = _start_reward_engine(session, config, reward)
    await_engines(session.engines, deadline_s=config.cluster.start_timeout_s)
    learner = _learner_group(config, ranks)
    channel = _weight_channel(config, session, rollout_engines, ranks)
    publisher = WeightPublisher(
        learner,
        rollout_engines,
        learner.weight_plan(config.weights.bucket_bytes, channel),
        verify=config.weights.verify,
        dtype=resolve_dtype(config.model.dtype, hardware),
        vocabulary_size=len(tokenizer),
        call_timeout_s=config.cluster.call_timeout_s,
    )
    generators = _generators(config, rollout_engines, reward_engine, tokenizer=tokenizer, timeline=timeline)
    return RLEngines(learner, generators, publisher)


def start_sft_learner(session: ClusterSession, config: SFTConfig) -> LearnerGroup:
    """Start the learner ranks of supervised fine-tuning and wait until each is ready."""
    hardware = detect_hardware()
    placement = plan_placement(config, hardware.cpus, hardware.gpus)
    ranks = _start_learner(session, config, placement, temperature=1.0)
    await_engines(ranks, deadline_s=config.cluster.start_timeout_s)
    return _learner_group(config, ranks)


def start_evaluation_engines(
    session: ClusterSession,
    config: EvaluateConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    timeline: Timeline,
    reward: Callable[..., Any] | None,
) -> Generators:
    """Start rollout engines, which load the model from disk, and the reward engine; wait until each is ready."""
    hardware = detect_hardware()
    placement = plan_placement(config, hardware.cpus, hardware.gpus)
    rollout_engines = _start_rollout_engines(session, config, placement, hardware)
    reward_engine = _start_reward_engine(session, config, reward)
    await_engines(session.engines, deadline_s=config.cluster.start_timeout_s)
    return _generators(config, rollout_engines, reward_engine, tokenizer=tokenizer, timeline=timeline)


def _start_learner(
    session: ClusterSession, config: RLConfig | SFTConfig, placement: Placement, *, temperature: float
) -> list[RemoteEngine]:
    # Only here: it imports torch, and bad input is to be refused at once.
    from slipstream.training.learner import LearnerRank, LearnerSpec

    actors = placement.of_role("learner")
    steps_per_batch = config.optimizer_steps_per_batch if isinstance(config, RLConfig) else 1
    ranks = []
    for rank, actor in enumerate(actors):
        spec = LearnerSpec(
            model_path=config.model.path,
            dtype=config.model.dtype,
            training=config.training.model_copy(update={"threads": actor.threads}),
            temperature=temperature,
            total_optimizer_steps=config.steps * steps_per_batch,
            load_reference=isinstance(config, RLConfig) and config.algorithm.kl_coefficient > 0,
            seed=config.seed,
            rank=rank,
            world_size=len(actors),
            activation_checkpointing=config.model.activation_checkpointing,
            timeout_s=config.cluster.call_timeout_s,
        )
        ranks.append(_start_actor(session, actor, LearnerRank, spec))
    # The ranks meet where rank 0 turned out to be, at a port that is free there.
    identify_engines(ranks, deadline_s=config.cluster.start_timeout_s)
    meeting_point = _meeting_point(ranks, config)
    for rank_engine in ranks:
        rank_engine.start_arguments = (meeting_point,)
    return ranks


def _meeting_point(ranks: list[RemoteEngine], config: RLConfig | SFTConfig) -> tuple[str, int]:
    """An address and port that rank 0 holds open for others to come to."""
    call = ranks[0].submit("meeting_point", ranks[0].address)
    address, port = gather([call], deadline_s=config.cluster.start_timeout_s)[0]
    return address, port


def _start_rollout_engines(
    session: ClusterSession, config: RLConfig | EvaluateConfig, placement: Placement, hardware: Hardware
) -> list[RemoteEngine]:
    data = config.data if isinstance(config, RLConfig) else config.evaluation.data
    assert data is not None
    longest_prompt = max(
        data.max_prompt_tokens, config.evaluation.data.max_prompt_tokens if config.evaluation.data else 0
    )
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
    session: ClusterSession, config: RLConfig | EvaluateConfig, reward: Callable[..., Any] | None
) -> RemoteEngine:
    from slipstream.rewards.pool import pickle_function

    function = None if reward is None else pickle_function(reward)
    return session.start_engine(
        "reward engine", RewardEngine, config.reward, function, os.getcwd(), cpus=REWARD_ENGINE_CPUS
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


def _learner_group(config: RLConfig | SFTConfig, ranks: list[RemoteEngine]) -> LearnerGroup:
    return LearnerGroup(
        ranks,
        tokens_per_micro_batch=config.training.tokens_per_micro_batch,
        call_timeout_s=config.cluster.call_timeout_s,
    )


def _generators(
    config: RLConfig | EvaluateConfig,
    engines: list[RemoteEngine],
    reward_engine: RemoteEngine,
    *,
    tokenizer: PreTrainedTokenizerBase,
    timeline: Timeline,
) -> Generators:
    return Generators(
        engines=engines,
        reward_engine=reward_engine,
        tokenizer=tokenizer,
        timeline=timeline,
        seed=config.seed,
        call_timeout_s=config.cluster.call_timeout_s,
    )


def _weight_channel(
    config: RLConfig, session: ClusterSession, engines: list[RemoteEngine], ranks: list[RemoteEngine]
) -> ChannelAddress:
    """Shared memory where learner and engines see the same, gloo otherwise."""
    kind = config.weights.channel
    if kind == "auto":
        kind = "shared_memory" if {engine.node for engine in engines} == {ranks[0].node} else "gloo"
    host, port = "127.0.0.1", 0
    if kind == "gloo":
        host, port = gather(
            [ranks[0].submit("meeting_point", ranks[0].address)], deadline_s=config.cluster.start_timeout_s
        )[0]
    return ChannelAddress(
        kind=kind,
        run_id=session.run_id,
        receivers=len(engines),
        host=host,
        port=port,
        timeout_s=config.cluster.call_timeout_s,
    )
