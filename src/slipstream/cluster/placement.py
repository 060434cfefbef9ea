"""Which actors a run has, and how much of the machine each gets: a pure function of configuration and machine.

The dry run prints it and the workflows start exactly it, so the two can't disagree. Leaves out starting anything,
and placement over several machines, which is Ray's.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NoReturn

from slipstream.config.generate import AnsweringConfig, GenerateConfig
from slipstream.config.reward_model import SupervisedConfig
from slipstream.config.schema import RLConfig
from slipstream.errors import ConfigError

Role = Literal["controller", "learner", "critic", "rollout", "reward", "reward_model"]

Layout = tuple[int, int, int]
"""Of a learner: ranks that learn from different data, times those that share it, times those that share weights."""

LAYOUT_KEYS = ("training.data_parallel", "training.sequence_parallel", "training.tensor_parallel")

ACTOR_CPU_SHARE = 0.01
"""CPUs that an engine asks Ray for. Ray only counts; threads decide what an engine uses. Engines that take turns use
the same cores, so whole numbers would not fit on a small machine."""


@dataclass(frozen=True)
class GpuShares:
    """Parts of a GPU for each learner rank, critic rank and worker of a rollout engine, and for the reward model."""

    learner: float
    critic: float
    rollout: float
    reward_model: float


NO_GPU = GpuShares(0.0, 0.0, 0.0, 0.0)
WHOLE_GPUS = GpuShares(1.0, 1.0, 1.0, 1.0)
# The reward model only computes forward passes, now and then: it needs no GPU of its own, and finds room on any.
BESIDE_AN_ENGINE = GpuShares(learner=1.0, critic=1.0, rollout=0.95, reward_model=0.05)
# Ray gives an actor parts of one GPU or several whole ones: where an engine has several workers, it shares none.
BESIDE_A_RANK = GpuShares(learner=0.95, critic=0.95, rollout=1.0, reward_model=0.05)

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
    """One process of a run. `cpus` and `gpus` are what Ray is asked for, `threads` what the process computes with.

    A rollout engine of several workers has a GPU, and so many threads, for each of them.
    """

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


def plan_placement(config: RLConfig | SupervisedConfig | AnsweringConfig, cpus: int, gpus: int) -> Placement:
    """Divide `cpus` cores and `gpus` GPUs of this machine among the processes of a run.

    The controller and the reward workers are not Ray actors: they ask Ray for nothing. A reward model computes while
    engines generate, and with as many threads as one of them.
    Raises ConfigError where the run wants more GPUs than there are.
    """
    ranks = 0 if isinstance(config, AnsweringConfig) else config.training.ranks
    engines, width = 0, 1
    if not isinstance(config, SupervisedConfig):
        engines, width = config.rollout.engines, config.rollout.tensor_parallel
    workers = engines * width
    has_critic = isinstance(config, RLConfig) and config.has_critic
    has_reward_model = not isinstance(config, SupervisedConfig) and config.reward.model is not None
    alternating = isinstance(config, RLConfig) and config.rollout.max_staleness == 0
    layout = None
    if not isinstance(config, AnsweringConfig):
        training = config.training
        layout = training.data_parallel, training.sequence_parallel, training.tensor_parallel
    shares = _gpu_shares(
        layout,
        engines=engines,
        width=width,
        gpus=gpus,
        alternating=alternating,
        has_critic=has_critic,
        has_reward_model=has_reward_model,
    )

    learner_threads = None if isinstance(config, AnsweringConfig) else config.training.threads
    rollout_threads = None if isinstance(config, SupervisedConfig) else config.rollout.threads
    learner_threads = learner_threads or max(1, cpus // (ranks if alternating else ranks + workers))
    rollout_threads = rollout_threads or max(1, cpus // (workers if alternating else ranks + workers))

    def actor(name: str, role: Role, threads: int, gpu_share: float) -> ActorPlacement:
        return ActorPlacement(name, role, ACTOR_CPU_SHARE, threads, gpu_share)

    actors = [ActorPlacement("controller", "controller", cpus=0.0, threads=1, gpus=0.0)]
    actors += [actor(f"learner rank {rank}", "learner", learner_threads, shares.learner) for rank in range(ranks)]
    if has_critic:
        actors += [actor(f"critic rank {rank}", "critic", learner_threads, shares.critic) for rank in range(ranks)]
    engine_gpus = width * shares.rollout
    actors += [actor(f"rollout engine {index}", "rollout", rollout_threads, engine_gpus) for index in range(engines)]
    if has_reward_model:
        actors.append(actor("reward engine", "reward_model", rollout_threads, shares.reward_model))
    for index in range(_reward_workers(config)):
        actors.append(ActorPlacement(f"reward worker {index}", "reward", cpus=0.0, threads=1, gpus=0.0))
    return Placement(tuple(actors), alternating=alternating)


def _reward_workers(config: RLConfig | SupervisedConfig | AnsweringConfig) -> int:
    """Processes that run the reward function. One given as an object is not in the configuration."""
    if isinstance(config, SupervisedConfig):
        return 0
    has_other = config.reward.model is not None or bool(config.reward.urls)
    needs_none = has_other or isinstance(config, GenerateConfig)
    return 0 if needs_none and config.reward.function is None else config.reward.workers


def _gpu_shares(
    layout: Layout | None,
    *,
    engines: int,
    width: int,
    gpus: int,
    alternating: bool,
    has_critic: bool,
    has_reward_model: bool,
) -> GpuShares:
    """A GPU for each process where there are enough, else they share, ranks and engines in a synchronous run only.

    `layout` is the learner's, None for no learner. `width`: workers of an engine; several share GPUs with nobody.
    With a critic, ranks and GPUs must be as many, or there must be a GPU for each rank and each critic rank: of other
    numbers Ray could put two critic ranks on a GPU where no rank is.
    """
    if gpus == 0:
        return NO_GPU
    ranks = 0 if layout is None else math.prod(layout)
    all_ranks = 2 * ranks if has_critic else ranks
    wanted = all_ranks + engines * width
    if wanted + has_reward_model <= gpus:
        return WHOLE_GPUS
    if wanted <= gpus and (width == 1 or ranks):
        return BESIDE_AN_ENGINE if width == 1 else BESIDE_A_RANK
    if alternating and width == 1 and max(all_ranks, engines) <= gpus:
        return SHARED_BY_TWO
    if alternating and width == 1 and has_critic and ranks == gpus and engines <= gpus:
        return SHARED_BY_THREE
    _refuse(
        layout,
        engines=engines,
        width=width,
        gpus=gpus,
        alternating=alternating,
        has_critic=has_critic,
        has_reward_model=has_reward_model,
    )


def _refuse(
    layout: Layout | None,
    *,
    engines: int,
    width: int,
    gpus: int,
    alternating: bool,
    has_critic: bool,
    has_reward_model: bool,
) -> NoReturn:
    """Say what does not fit, and what is nearest to it of all that does."""
    learners = 2 if has_critic else 1
    # What there is besides engines: one rank of each learner, or else a reward model where engines do not share.
    others = learners if layout is not None else int(has_reward_model and width > 1)
    fitting_width = max(1, min(width, gpus - others))
    if fitting_width == 1 and layout is None:
        others = 0
    can_share = alternating and fitting_width == 1
    keys = []
    if layout is not None:
        keys = [" x ".join(f"{key} ({size})" for key, size in zip(LAYOUT_KEYS, layout, strict=True))]
    several = f" x rollout.tensor_parallel ({width})" if width > 1 else ""
    keys += [f"rollout.engines ({engines}){several}"] * (engines > 0)
    wanted = " and ".join(keys) + (", with a critic," if has_critic else "")
    ranks = 0 if layout is None else learners * math.prod(layout)
    alone = ranks + engines * width + (has_reward_model and width > 1 and layout is None)
    needed = max(ranks, engines) if alternating and width == 1 else alone
    problem = f"{wanted} need {needed} GPUs, this machine has {gpus}"
    # Ranks and engines that take turns use the same GPUs; others leave one to each learner.
    reserved = 0 if can_share else others
    if gpus < reserved + (engines > 0):
        raise ConfigError(f"{problem}; a run of this kind needs at least {reserved + (engines > 0)}")
    fitting = min(engines, (gpus - reserved) // fitting_width)
    nearest = [f"rollout.engines {fitting}"] * (engines > 0) + [f"rollout.tensor_parallel {fitting_width}"] * (
        width > 1
    )
    if layout is not None:
        left = gpus if can_share else gpus - fitting * fitting_width
        possible = {*range(1, left // learners + 1), *([gpus] if can_share else [])}
        found = nearest_layout(layout, possible)
        nearest = [*(f"{key} {size}" for key, size in zip(LAYOUT_KEYS, found, strict=True)), *nearest]
    raise ConfigError(f"{problem}; the nearest that fits is {', '.join(nearest)}")


def nearest_layout(layout: Layout, possible: Collection[int]) -> Layout:
    """Of all layouts with a possible number of ranks, the one nearest to `layout`.

    First by the ranks that share weights, never more of them: divided less the model may not fit, and it may not be
    divisible any further. Then by the number of ranks.
    """
    _, sequence, tensor = layout
    ranks = math.prod(layout)
    layouts = [
        (each // (width * pieces), width, pieces)
        for each in possible
        for pieces in range(1, min(each, tensor) + 1)
        for width in range(1, each + 1)
        if each % (width * pieces) == 0
    ]

    def distance(found: Layout) -> tuple[int, ...]:
        return tensor - found[2], abs(math.prod(found) - ranks), math.prod(found), abs(found[1] - sequence)

    return min(layouts, key=distance)
