"""Tiny models, engines on them, and the log-probs that a plain forward pass gives; and a small run of stand-ins.

The second half is for the rollout stream: engines that answer at once, in random order, with samples that carry the
version they have now, a reward that is whatever a test wants, and a real ledger.
"""

import asyncio
import os
import random
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from slipstream.cluster.calls import PendingCall
from slipstream.data.cursor import PromptCursor
from slipstream.data.trajectory import Prompt, Sample, Trajectory
from slipstream.observe.ledger import Ledger
from slipstream.rewards.child import RewardResult
from slipstream.rollout import stream as stream_module
from slipstream.rollout.admission import Admission
from slipstream.rollout.dynamic_sampling import DynamicSampling
from slipstream.rollout.messages import GroupRequest, GroupResult, RolloutEngineSpec, SamplingParameters
from slipstream.rollout.stream import Generators, GroupStream, RolloutStream
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
    """Calls `generate` to its end; results by group id."""

    def call(engine: Any, requests: Any, sampling: Any) -> dict[str, Any]:
        async def gather() -> dict[str, Any]:
            return {result.group_id: result async for result in engine.generate(requests, sampling)}

        return run(gather())

    return call


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
    """Stands for an object reference: holds its value already."""

    def __init__(self, value: Any) -> None:
        self.value = value


class StreamReference:
    """Stands for the reference of a call that yields; groups finish in random order."""

    def __init__(self, values: Sequence[Any], chance: random.Random) -> None:
        self.values = list(values)
        self.is_over = False
        chance.shuffle(self.values)

    def __next__(self) -> Reference:
        if not self.values:
            self.is_over = True
            raise StopIteration
        return Reference(self.values.pop())


class RolloutStandIn:
    """Answers every request at once. `calls` has the requests of each call and whether they were to be greedy."""

    def __init__(self, index: int, world: "World") -> None:
        self.name = f"rollout engine {index}"
        self.world = world
        self.calls: list[tuple[str, list[GroupRequest]]] = []
        self.most_calls_at_a_time = 0
        self._streams: list[StreamReference] = []

    @property
    def requests(self) -> list[GroupRequest]:
        return [request for _, requests in self.calls for request in requests]

    def stream(self, method: str, requests: list[GroupRequest], sampling: SamplingParameters) -> PendingCall:
        assert method == "generate"
        assert sampling in (SAMPLING, replace(SAMPLING, temperature=0.0))
        kind = "sampled" if sampling == SAMPLING else "greedy"
        self.calls.append((kind, requests))
        results = [GroupResult(request.group_id, self._samples(request, kind), seconds=0.1) for request in requests]
        self._streams.append(StreamReference(results, self.world.chance))
        self.most_calls_at_a_time = max(self.most_calls_at_a_time, sum(not s.is_over for s in self._streams))
        return PendingCall(self, method, self._streams[-1])  # type: ignore[arg-type]

    def log_tail(self) -> str:
        return f"a line of {self.name}"

    def _samples(self, request: GroupRequest, kind: str) -> list[Sample]:
        versions = np.full(2, self.world.version, np.int64)
        arrays = (np.array([40, 41 if kind == "sampled" else 42]), np.zeros(2, np.float32), versions)
        return [Sample(*arrays, finish_reason="stop", seconds=0.1) for _ in range(request.samples)]


class RewardStandIn:
    """Gives trajectories the reward of `reward_of`; the last one of a group that is `failing` fails."""

    name = "reward engine"

    def __init__(self) -> None:
        self.failing: Callable[[str], bool] = lambda group_id: False
        self.reward_of: Callable[[Trajectory], float] = lambda trajectory: 1.0

    def submit(self, method: str, trajectories: list[Trajectory]) -> PendingCall:
        assert method == "score"
        results = [RewardResult(self.reward_of(t), {"part": 1.0}, None, 0.01) for t in trajectories]
        if self.failing(trajectories[0].group_id):
            results[-1] = RewardResult(None, {}, "raised: ValueError: no", 0.01)
        return PendingCall(self, method, Reference(results))  # type: ignore[arg-type]

    def log_tail(self) -> str:
        return ""


class World:
    """Engines, ledger and loop of a small run."""

    def __init__(self, folder: Path, tokenizer: Any, *, engines: int, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.version = 0
        self.engines = [RolloutStandIn(index, self) for index in range(engines)]
        self.reward = RewardStandIn()
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.spans: list[tuple[str, str]] = []
        timeline: Any = type("Timeline", (), {"add": lambda _, lane, name, **times: self.spans.append((lane, name))})()
        self.generators = Generators(
            engines=self.engines,  # type: ignore[arg-type]
            reward_engine=self.reward,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            timeline=timeline,
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
        return RolloutStream(
            stream,
            PromptCursor(prompts, seed=0, shuffle=True),
            publisher=self,  # type: ignore[arg-type]
            ledger=self.ledger,
            admission=Admission(groups_per_step, max_staleness),
            on_failure=on_failure,
            dynamic_sampling=None if limit is None else DynamicSampling(limit),
        )

    def publish(self, version: int) -> None:
        self.version = version


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Whatever is waited for is there; which of several comes first is random."""
    import ray

    chance = random.Random(0)

    def wait(references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [chance.choice(references)], []

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(stream_module, "fetch", lambda call, reference: reference.value)
    return chance


@pytest.fixture
def make_world(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., World]:
    def make(*, engines: int = 2, seed: int = 0) -> World:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return World(folder, tiny_tokenizer, engines=engines, seed=seed)

    return make
