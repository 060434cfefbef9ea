"""Tiny models, engines on them, and the log-probs that a plain forward pass gives; and a small run of stand-ins.

The second half is for the rollout stream: engines that answer at once, in random order, with samples that carry the
version they have now, a reward that is whatever a test wants, and a real ledger.
"""

import asyncio
import os
import random
import socket
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from slipstream.cluster import calls as calls_module
from slipstream.cluster import restarts as restarts_module
from slipstream.cluster.calls import EngineState, PendingCall, ProcessIdentity
from slipstream.cluster.restarts import EngineRestarts
from slipstream.data.failure import FailureKind, RewardFailure
from slipstream.data.mixture import Mixture, PromptCursor
from slipstream.data.trajectory import BASELINE_INDEX, Prompt, Sample, Trajectory
from slipstream.errors import EngineLostError
from slipstream.observe.ledger import Ledger
from slipstream.observe.occupancy import Occupancy
from slipstream.rewards.child import RewardResult
from slipstream.rollout import group_stream as stream_module
from slipstream.rollout.admission import Admission
from slipstream.rollout.dynamic_sampling import DynamicSampling
from slipstream.rollout.group_stream import Generators, GroupStream
from slipstream.rollout.messages import GroupRequest, ResponseResult, RolloutEngineSpec, SamplingParameters
from slipstream.rollout.stream import RolloutStream
from slipstream.weights.plan import ChannelAddress, WeightPlan, make_plan

PAD, END, SECOND_END = 256, 257, 258
VOCABULARY_SIZE = 320
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
SAMPLING = SamplingParameters(temperature=1.0, max_response_tokens=4)
ENGINE_KINDS = ["transformers", pytest.param("vllm", marks=pytest.mark.slow)]


def save_tiny_model(folder: Path, *, tied: bool) -> Path:
    """A random Llama with byte tokens, two end tokens, and a generation_config that an engine must not obey."""
    torch.manual_seed(7)
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in ("<pad>", "<end>", "<second end>", *("".join(pair) for pair in MERGES)):
        vocabulary[token] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=256,
            initializer_range=0.15,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
        )
    )
    model.generation_config = GenerationConfig(
        eos_token_id=[END, SECOND_END], do_sample=True, temperature=0.2, top_k=3, top_p=0.5, repetition_penalty=1.5
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


def engine_spec(model_path: Path, **changes: Any) -> RolloutEngineSpec:
    settings: dict[str, Any] = {
        "model_path": str(model_path),
        "dtype": "float32",
        "device": "cpu",
        "max_sequence_tokens": 160,
        "max_concurrent_sequences": 64,
        "kv_cache_bytes": 1 << 26,
        "gpu_memory_share": 0.5,
        "threads": 1,
        "seed": 0,
        "engine_index": 0,
    }
    return RolloutEngineSpec(**(settings | changes))


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., RolloutEngineSpec]:
    return engine_spec


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine on the one event loop that the engines of a session live in."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def engines(run: Callable[..., Any], tied_model: Path, untied_model: Path) -> Iterator[Callable[[str, bool], Any]]:
    """`engines(kind, tied)`: a started engine, the same one each time."""
    started: dict[tuple[str, bool], Any] = {}

    def get(kind: str, tied: bool) -> Any:
        if (kind, tied) not in started:
            spec = engine_spec(tied_model if tied else untied_model)
            if kind == "vllm":
                from slipstream.rollout.vllm_engine import VLLMEngine, vllm_environment

                os.environ.update(vllm_environment(spec))
                engine: Any = VLLMEngine(spec)
            else:
                from slipstream.rollout.transformers_engine import TransformersEngine

                engine = TransformersEngine(spec)
            run(engine.start())
            started[kind, tied] = engine
        return started[kind, tied]

    yield get
    for engine in started.values():
        run(engine.shutdown())


@pytest.fixture(params=ENGINE_KINDS)
def engine(request: pytest.FixtureRequest, engines: Callable[[str, bool], Any]) -> Any:
    """An engine of each kind on the model with tied embeddings, with whatever weights it has by now."""
    return engines(request.param, True)


@pytest.fixture(scope="session")
def collect(run: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Calls `generate` to its end; the samples of each group in their order, by group id."""

    def call(engine: Any, requests: Any, sampling: Any) -> dict[str, Any]:
        async def gather() -> list[ResponseResult]:
            return [result async for results in engine.generate(requests, sampling) for result in results]

        return by_group(run(gather()))

    return call


def by_group(results: Sequence[ResponseResult]) -> dict[str, Any]:
    """The samples of each group in their order, by group id. Fails if one is missing or came twice."""
    groups: dict[str, dict[int, Sample]] = {}
    for result in results:
        assert result.sample_index not in groups.setdefault(result.group_id, {}), "it came twice"
        groups[result.group_id][result.sample_index] = result.sample
    return {
        group_id: SimpleNamespace(samples=[samples[index] for index in range(len(samples))])
        for group_id, samples in groups.items()
    }


def forward_log_probs(model: PreTrainedModel, tokens: Any, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of tokens[1:] by a plain forward pass."""
    row = torch.tensor(np.asarray(tokens))
    with torch.no_grad():
        log_probs = (model(row[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return log_probs.gather(1, row[1:, None])[:, 0].numpy()


@pytest.fixture(scope="session")
def reference_log_probs() -> Callable[..., np.ndarray]:
    return forward_log_probs


@pytest.fixture(scope="session")
def load_reference() -> Callable[[Path], PreTrainedModel]:
    return lambda path: LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def perturb(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Change every weight of a model by about a fifth."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="session")
def changed() -> Callable[[PreTrainedModel, int], PreTrainedModel]:
    return perturb


def several_buckets(model: PreTrainedModel, channel: ChannelAddress) -> WeightPlan:
    tensors = ((name, str(p.dtype).removeprefix("torch."), tuple(p.shape)) for name, p in model.named_parameters())
    return make_plan(tensors, 60_000, channel=channel)


@pytest.fixture(scope="session")
def shared_memory_plan() -> Callable[[PreTrainedModel], WeightPlan]:
    return lambda model: several_buckets(model, ChannelAddress("shared_memory", f"test-{uuid.uuid4().hex[:8]}"))


@pytest.fixture(scope="session")
def gloo_plan() -> Callable[[PreTrainedModel], WeightPlan]:
    def plan(model: PreTrainedModel) -> WeightPlan:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return several_buckets(model, ChannelAddress("gloo", "test", port=port, timeout_s=30))

    return plan


class Reference:
    """Stands for an object reference: holds its value, or the error that fetching it raises, already."""

    def __init__(self, value: Any) -> None:
        self.value = value


def fetch_stand_in(call: PendingCall, reference: Reference) -> Any:
    if isinstance(reference.value, Exception):
        raise reference.value
    return reference.value


class StreamReference:
    """Stands for the reference of a call that yields; responses end in random order, one or several together."""

    def __init__(self, values: Sequence[Any], chance: random.Random) -> None:
        self.values = list(values)
        self.is_over = False
        self.is_dead = False
        chance.shuffle(self.values)
        # Taken from the end.
        self.values.sort(key=lambda result: -len(result.sample.tokens))
        self.chance = chance

    def __next__(self) -> Reference:
        if self.is_dead:
            return Reference(EngineLostError("it died during generate"))
        if not self.values:
            self.is_over = True
            raise StopIteration
        together = 1 + int(3 * self.chance.random())
        taken, self.values = self.values[-together:], self.values[:-together]
        return Reference(taken[::-1])

    def next_ready(self) -> bool:
        return self.is_dead or (bool(self.values) and self.chance.random() < 0.5)


class EngineStandIn:
    """What every engine has: a name, and a state that a restart changes."""

    takes_weights = False
    start_arguments = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = EngineState.READY
        self.incarnation = 0
        self.last_heard = 0.0
        self.pid: int | None = 1

    def identified(self, identity: ProcessIdentity) -> None:
        self.pid = identity.pid

    def log_tail(self) -> str:
        return f"a line of {self.name}"


class RolloutStandIn(EngineStandIn):
    """Answers every request at once. `calls` has the requests of each call and whether they were to be greedy."""

    def __init__(self, index: int, world: "World") -> None:
        super().__init__(f"rollout engine {index}")
        self.world = world
        self.calls: list[tuple[str, list[GroupRequest]]] = []
        self.most_calls_at_a_time = 0
        self.die_next = False
        self.length_of: Callable[[str], int] = lambda group_id: 2
        self._streams: list[StreamReference] = []

    @property
    def requests(self) -> list[GroupRequest]:
        return [request for _, requests in self.calls for request in requests]

    def stream(self, method: str, requests: list[GroupRequest], sampling: SamplingParameters) -> PendingCall:
        assert method == "generate"
        assert sampling in (SAMPLING, replace(SAMPLING, temperature=0.0))
        kind = "sampled" if sampling == SAMPLING else "greedy"
        self.calls.append((kind, requests))
        results = [
            ResponseResult(request.group_id, index, self._sample(kind, self.length_of(request.group_id)))
            for request in requests
            for index in range(request.samples)
        ]
        self._streams.append(StreamReference(results, self.world.chance))
        if self.die_next:
            self.die_next = False
            self.die()
        self.most_calls_at_a_time = max(self.most_calls_at_a_time, sum(not s.is_over for s in self._streams))
        return PendingCall(self, method, self._streams[-1], self.incarnation)  # type: ignore[arg-type]

    def submit(self, method: str) -> PendingCall:
        assert method == "start"
        return PendingCall(self, method, self.world.starts[self.name], self.incarnation)  # type: ignore[arg-type]

    def die(self) -> None:
        """All calls under way are lost."""
        for stream in self._streams:
            stream.is_dead = True

    def _sample(self, kind: str, length: int) -> Sample:
        versions = np.full(length, self.world.version, np.int64)
        tokens = np.array([40] * (length - 1) + [41 if kind == "sampled" else 42])
        arrays = (tokens, np.zeros(length, np.float32), versions)
        return Sample(*arrays, finish_reason="stop", seconds=0.1)


class RewardStandIn(EngineStandIn):
    """Gives trajectories the reward of `reward_of`; the last one of a group that is `failing` fails.

    The next `losses` calls are answered by its death.
    """

    def __init__(self, world: "World") -> None:
        super().__init__("reward engine")
        self.world = world
        self.losses = 0
        self.failing: Callable[[str], bool] = lambda group_id: False
        self.last_index = 1
        self.reward_of: Callable[[Trajectory], float] = lambda trajectory: 1.0
        self.answer_of: Callable[[Trajectory], str | None] = lambda trajectory: None

    def submit(self, method: str, trajectories: Sequence[Trajectory] = ()) -> PendingCall:
        if method == "start":
            return PendingCall(self, method, self.world.starts[self.name], self.incarnation)  # type: ignore[arg-type]
        assert method == "score"
        if self.losses:
            self.losses -= 1
            lost = Reference(EngineLostError("it died during score"))
            return PendingCall(self, method, lost, self.incarnation)  # type: ignore[arg-type]
        results = [
            RewardResult(self.reward_of(t), {"part": 1.0}, seconds=0.01, answer=self.answer_of(t), reads_answers=True)
            for t in trajectories
        ]
        last = trajectories[-1]
        if self.failing(last.group_id) and last.sample_index == self.last_index:
            results[-1] = RewardResult(
                None, failure=RewardFailure(FailureKind.RAISED, "raised: ValueError: no"), seconds=0.01
            )
        return PendingCall(self, method, Reference(results), self.incarnation)  # type: ignore[arg-type]


class World:
    """Engines, ledger and loop of a small run."""

    def __init__(self, folder: Path, tokenizer: Any, *, engines: int, seed: int = 0, limit: int = 0) -> None:
        """`limit`: how often each engine may be started anew."""
        self.chance = random.Random(seed)
        self.version = 0
        self.opened: list[RolloutStream] = []
        self.engines = [RolloutStandIn(index, self) for index in range(engines)]
        self.reward = RewardStandIn(self)
        # What the next starts come to, by engine, and which engines were started anew.
        self.starts: dict[str, Reference] = defaultdict(lambda: Reference({}))
        self.restarted: list[str] = []
        self.ledger_path = folder / "ledger.jsonl"
        self.ledger = Ledger(self.ledger_path)
        self.spans: list[tuple[str, str]] = []
        timeline: Any = type("Timeline", (), {"add": lambda _, lane, name, **times: self.spans.append((lane, name))})()
        self.generators = Generators(
            engines=self.engines,  # type: ignore[arg-type]
            reward_engine=self.reward,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            timeline=timeline,
            occupancy=Occupancy(),
            restarts=EngineRestarts(self, limit=limit, start_timeout_s=3.0, timeline=timeline),
            seed=7,
            call_timeout_s=3.0,
        )

    def rollouts(
        self,
        *,
        groups_per_step: int = 4,
        samples: int = 2,
        max_staleness: int = 0,
        on_failure: str = "retry",
        limit: int | None = None,
        greedy_baseline: bool = False,
    ) -> RolloutStream:
        """A stream of ten prompts; with a `limit` it samples dynamically."""
        self.reward.last_index = BASELINE_INDEX if greedy_baseline else samples - 1
        prompts = [
            Prompt(row=row, tokens=np.array([row + 1]), text=f"prompt {row}", label=None, fields={})
            for row in range(10)
        ]
        stream = GroupStream(
            self.generators,
            SAMPLING,
            samples_per_prompt=samples,
            purpose="training",
            greedy_baseline=greedy_baseline,
        )
        rollouts = RolloutStream(
            stream,
            PromptCursor(Mixture({"": prompts}, {"": 1.0}), seed=0, shuffle=True),
            publisher=self,  # type: ignore[arg-type]
            ledger=self.ledger,
            admission=Admission(groups_per_step, max_staleness),
            on_failure=on_failure,
            dynamic_sampling=None if limit is None else DynamicSampling(limit),
        )
        self.opened.append(rollouts)
        return rollouts

    def publish(self, version: int) -> None:
        self.version = version

    def restart_engine(self, engine: Any) -> PendingCall:
        self.restarted.append(engine.name)
        engine.pid = None
        return PendingCall(
            engine, "process start", Reference(ProcessIdentity(2, 0.0, "here", "node")), engine.incarnation
        )

    def close(self) -> None:
        for rollouts in self.opened:
            rollouts.close()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Whatever is waited for is there; which of several comes first is random."""
    import ray

    chance = random.Random(0)

    def wait(references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [chance.choice(references)], []

    monkeypatch.setattr(ray, "wait", wait)
    for module in (stream_module, calls_module, restarts_module):
        monkeypatch.setattr(module, "fetch", fetch_stand_in)
    return chance


@pytest.fixture
def make_world(tmp_path: Path, tiny_tokenizer: Any, arrivals: random.Random) -> Iterator[Callable[..., World]]:
    """Worlds whose streams are closed while what they wait by is still in place: the pump would wait by Ray itself."""
    worlds: list[World] = []

    def make(*, engines: int = 2, seed: int = 0, limit: int = 0) -> World:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        worlds.append(World(folder, tiny_tokenizer, engines=engines, seed=seed, limit=limit))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
