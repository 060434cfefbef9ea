"""Which actors a run has, and how much of the machine each gets: a pure function of configuration and machine.

The dry run prints it and the workflows start exactly it, so the two can't disagree. Leaves out starting anything,
and placement over several machines, which is Ray's.
"""

from dataclasses import dataclass
from typing import Literal, NoReturn

from slipstream.config.reward_model import SupervisedConfig
from slipstream.config.schema import EvaluateConfig, RLConfig
from slipstream.errors import ConfigError

Role = Literal["controller", "learner", "critic", "rollout", "reward", "reward_model"]

ACTOR_CPU_SHARE = 0.01
"""CPUs that an engine asks Ray for. Ray only counts; threads decide what an engine uses. Engines that take turns use
the same cores, so whole numbers would not fit on a small machine."""


@dataclass(frozen=True)
class GpuShares:
    """Parts of a GPU that each learner rank, critic rank and rollout engine, and the reward model, asks Ray for."""

    learner: float
    critic: float
    rollout: float
    reward_model: float


NO_GPU = GpuShares(0.0, 0.0, 0.0, 0.0)
WHOLE_GPUS = GpuShares(1.0, 1.0, 1.0, 1.0)
# The reward model only computes forward passes, now and then: it needs no GPU of its own, and finds room on any.
BESIDE_AN_ENGINE = GpuShares(learner=1.0, critic=1.0, rollout=0.95, reward_model=0.05)

# Shares of GPUs are such that Ray never puts two ranks of one learner on one GPU, which NCCL refuses, and always finds
# room for a critic rank and an engine. Ranks are placed first, then critic ranks, then engines.
#
# A rank, or a critic rank, and beside it an engine and the reward model: two ranks of whatever kind do not fit on one
# GPU.
SHARED_BY_TWO = GpuShares(learner=0.51, critic=0.51, rollout=0.44, reward_model=0.05)
# All of them on each GPU, for as many ranks as there are GPUs: beside a rank there is room for one critic rank and not
# two, beside both for one engine and the reward model.
SHARED_BY_THREE = GpuShares(learner=0.51, critic=0.25, rollout=0.19, reward_model=0.05)


@dataclass(frozen=True)
class ActorPlacement:
    """One process of a run. `cpus` and `gpus` are what Ray is asked for, `threads` what the process computes with."""

    name: str
    role: Role
    cpus: float
    threads: int
    gpus: float


@dataclass(frozen=True)
class Placement:
    """All processes of a run. `alternating`: learner and rollout engines take turns, so each may use every core.

    Learner and critic always take turns.
    """

    actors: tuple[ActorPlacement, ...]
    alternating: bool

    def of_role(self, role: Role) -> tuple[ActorPlacement, ...]:
        """The actors of one role in the order of their ranks."""
        return tuple(actor for actor in self.actors if actor.role == role)


def plan_placement(config: RLConfig | SupervisedConfig | EvaluateConfig, cpus: int, gpus: int) -> Placement:
    """Divide `cpus` cores and `gpus` GPUs of this machine among the processes of a run.

    The controller and the reward workers are not Ray actors: they ask Ray for nothing. A reward model computes while
    engines generate, and with as many threads as one of them.
    Raises ConfigError where the run wants more GPUs than there are.
    """
    ranks = 0 if isinstance(config, EvaluateConfig) else config.training.ranks
    engines = 0 if isinstance(config, SupervisedConfig) else config.rollout.engines
    has_critic = isinstance(config, RLConfig) and config.has_critic
    has_reward_model = not isinstance(config, SupervisedConfig) and config.reward.model is not None
    alternating = isinstance(config, RLConfig) and config.rollout.max_staleness == 0
    shares = _gpu_shares(
        ranks=ranks,
        engines=engines,
        gpus=gpus,
        alternating=alternating,
        has_critic=has_critic,
        has_reward_model=has_reward_model,
    )

    learner_threads = None if isinstance(config, EvaluateConfig) else config.training.threads
    rollout_threads = None if isinstance(config, SupervisedConfig) else config.rollout.threads
    learner_threads = learner_threads or max(1, cpus // (ranks if alternating else ranks + engines))
    rollout_threads = rollout_threads or max(1, cpus // (engines if alternating else ranks + engines))

    def actor(name: str, role: Role, threads: int, gpu_share: float) -> ActorPlacement:
        return ActorPlacement(name, role, ACTOR_CPU_SHARE, threads, gpu_share)

    actors = [ActorPlacement("controller", "controller", cpus=0.0, threads=1, gpus=0.0)]
    actors += [actor(f"learner rank {rank}", "learner", learner_threads, shares.learner) for rank in range(ranks)]
    if has_critic:
        actors += [actor(f"critic rank {rank}", "critic", learner_threads, shares.critic) for rank in range(ranks)]
    actors += [actor(f"rollout engine {index}", "rollout", rollout_threads, shares.rollout) for index in range(engines)]
    if has_reward_model:
        actors.append(actor("reward engine", "reward_model", rollout_threads, shares.reward_model))
    for index in range(_reward_workers(config)):
        actors.append(ActorPlacement(f"reward worker {index}", "reward", cpus=0.0, threads=1, gpus=0.0))
    return Placement(tuple(actors), alternating=alternating)


def _reward_workers(config: RLConfig | SupervisedConfig | EvaluateConfig) -> int:
    """Processes that run the reward function. One given as an object is not in the configuration."""
    if isinstance(config, SupervisedConfig) or (config.reward.model is not None and config.reward.function is None):
        return 0
    return config.reward.workers


def _gpu_shares(
    *, ranks: int, engines: int, gpus: int, alternating: bool, has_critic: bool, has_reward_model: bool
) -> GpuShares:
    """A GPU for each process where there are enough, else they share, ranks and engines in a synchronous run only.

    With a critic, ranks and GPUs must be as many, or there must be a GPU for each rank and each critic rank: of other
    numbers Ray could put two critic ranks on a GPU where no rank is.
    """
    if gpus == 0:
        return NO_GPU
    all_ranks = 2 * ranks if has_critic else ranks
    if all_ranks + engines <= gpus:
        return WHOLE_GPUS if all_ranks + engines + has_reward_model <= gpus else BESIDE_AN_ENGINE
    if alternating and max(all_ranks, engines) <= gpus:
        return SHARED_BY_TWO
    if alternating and has_critic and ranks == gpus and engines <= gpus:
        return SHARED_BY_THREE
    _refuse(ranks=ranks, engines=engines, gpus=gpus, alternating=alternating, has_critic=has_critic)


def _refuse(*, ranks: int, engines: int, gpus: int, alternating: bool, has_critic: bool) -> NoReturn:
    keys = [f"training.ranks ({ranks})"] * (ranks > 0) + [f"rollout.engines ({engines})"] * (engines > 0)
    wanted = " and ".join(keys)
    if has_critic and alternating:
        fewer = f" or to at most {gpus // 2}" if gpus > 1 else ""
        raise ConfigError(
            f"{wanted}, with a critic, do not fit on the {gpus} GPUs of this machine; set training.ranks to "
            f"{gpus}{fewer}, and rollout.engines to at most {gpus}"
        )
    if has_critic:
        ranks, wanted = 2 * ranks, f"{wanted}, with a critic,"
    needed = max(ranks, engines) if alternating else ranks + engines
    raise ConfigError(
        f"{wanted} need {needed} GPUs, this machine has {gpus}; lower {'them' if len(keys) > 1 else 'it'} to what fits"
    )
