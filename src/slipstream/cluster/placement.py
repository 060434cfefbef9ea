"""Which actors a run has, and how much of the machine each gets: a pure function of configuration and machine.

The dry run prints it and the workflows start exactly it, so the two can't disagree. Leaves out starting anything,
and placement over several machines, which is Ray's.
"""

from dataclasses import dataclass
from typing import Literal

from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig
from slipstream.errors import ConfigError

Role = Literal["controller", "learner", "rollout", "reward"]

ACTOR_CPU_SHARE = 0.01
"""CPUs that an engine asks Ray for. Ray only counts; threads decide what an engine uses. Engines that take turns use
the same cores, so whole numbers would not fit on a small machine."""

SHARED_LEARNER_GPU = 0.51
SHARED_ROLLOUT_GPU = 0.49
"""Parts of a GPU that a learner rank and a rollout engine share. Unequal, so that Ray never puts two learner ranks on
one GPU (NCCL refuses that) and always finds room for the engine beside a rank."""


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
    """All processes of a run. `alternating`: learner and rollout engines take turns, so each may use every core."""

    actors: tuple[ActorPlacement, ...]
    alternating: bool

    def of_role(self, role: Role) -> tuple[ActorPlacement, ...]:
        """The actors of one role in the order of their ranks."""
        return tuple(actor for actor in self.actors if actor.role == role)


def plan_placement(config: RLConfig | SFTConfig | EvaluateConfig, cpus: int, gpus: int) -> Placement:
    """Divide `cpus` cores and `gpus` GPUs of this machine among the processes of a run.

    The controller and the reward workers are not Ray actors: they ask Ray for nothing.
    Raises ConfigError where the run wants more GPUs than there are.
    """
    ranks = 0 if isinstance(config, EvaluateConfig) else config.training.ranks
    engines = 0 if isinstance(config, SFTConfig) else config.rollout.engines
    workers = 0 if isinstance(config, SFTConfig) else config.reward.workers
    alternating = isinstance(config, RLConfig) and config.rollout.max_staleness == 0
    learner_gpus, rollout_gpus = _gpu_shares(ranks=ranks, engines=engines, gpus=gpus, alternating=alternating)

    learner_sharers = ranks if alternating else ranks + engines
    rollout_sharers = engines if alternating else ranks + engines
    learner_threads = None if isinstance(config, EvaluateConfig) else config.training.threads
    rollout_threads = None if isinstance(config, SFTConfig) else config.rollout.threads
    actors = [ActorPlacement("controller", "controller", cpus=0.0, threads=1, gpus=0.0)]
    for rank in range(ranks):
        threads = learner_threads or max(1, cpus // learner_sharers)
        actors.append(ActorPlacement(f"learner rank {rank}", "learner", ACTOR_CPU_SHARE, threads, learner_gpus))
    for index in range(engines):
        threads = rollout_threads or max(1, cpus // rollout_sharers)
        actors.append(ActorPlacement(f"rollout engine {index}", "rollout", ACTOR_CPU_SHARE, threads, rollout_gpus))
    for index in range(workers):
        actors.append(ActorPlacement(f"reward worker {index}", "reward", cpus=0.0, threads=1, gpus=0.0))
    return Placement(tuple(actors), alternating=alternating)


def _gpu_shares(*, ranks: int, engines: int, gpus: int, alternating: bool) -> tuple[float, float]:
    """GPUs per learner rank and per rollout engine: one each where there are enough, else a rank and an engine share.

    Sharing needs turns: only a synchronous run does it.
    """
    if gpus == 0:
        return 0.0, 0.0
    if ranks + engines <= gpus:
        return 1.0, 1.0
    if alternating and max(ranks, engines) <= gpus:
        return SHARED_LEARNER_GPU, SHARED_ROLLOUT_GPU
    needed = max(ranks, engines) if alternating else ranks + engines
    keys = [f"training.ranks ({ranks})"] * (ranks > 0) + [f"rollout.engines ({engines})"] * (engines > 0)
    raise ConfigError(
        f"{' and '.join(keys)} need {needed} GPUs, this machine has {gpus}; "
        f"lower {'them' if len(keys) > 1 else 'it'} to what fits"
    )
