"""A publish proves that every engine received and computes with the trainer's weights, or names what went wrong."""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.cluster import restarts as restarts_module
from slipstream.cluster.calls import EngineState
from slipstream.cluster.restarts import EngineRestarts
from slipstream.errors import EngineLostError, WeightSyncError
from slipstream.rollout.messages import RolloutEngineSpec
from slipstream.rollout.transformers_engine import TransformersEngine
from slipstream.weights import publisher as publisher_module
from slipstream.weights.plan import ChannelAddress, WeightPlan, make_plan
from slipstream.weights.publisher import WeightPublisher, compare_checksums
from slipstream.weights.shared_memory import SharedMemorySender, segment_path


class LocalCall:
    """A call that is made when its result is asked for: a `PendingCall` without Ray."""

    def __init__(self, function: Callable[[], Any], engine: Any = None) -> None:
        self.result = self.reference = function
        self.engine = engine
        self.incarnation = getattr(engine, "incarnation", 0)

    @property
    def is_lost(self) -> bool:
        return bool(self.incarnation != self.engine.incarnation)


class LocalEngine:
    """A real rollout engine with the face of a remote one. `faults` replace methods by name."""

    takes_weights = True
    start_arguments = ()

    def __init__(self, name: str, engine: TransformersEngine, runner: asyncio.Runner) -> None:
        self.name, self.engine, self.runner = name, engine, runner
        self.faults: dict[str, Callable[..., Any]] = {}
        self.state, self.incarnation, self.last_heard = EngineState.LOADED, 0, 0.0
        self.pid: int | None = 1

    def submit(self, method: str, *arguments: Any) -> LocalCall:
        if method in self.faults:
            return LocalCall(lambda: self.faults[method](*arguments), self)
        return LocalCall(lambda: self.runner.run(getattr(self.engine, method)(*arguments)), self)


class LocalRestarter:
    """Puts a new engine with the saved weights in the place of one that was lost."""

    def __init__(self) -> None:
        self.restarted: list[str] = []

    def restart_engine(self, engine: LocalEngine) -> LocalCall:
        self.restarted.append(engine.name)
        engine.engine = TransformersEngine(engine.engine._spec)
        engine.faults = {}
        return LocalCall(lambda: None, engine)


def local_outcomes(calls: Any, deadline_s: float) -> list[Any]:
    def outcome(call: LocalCall) -> Any:
        try:
            return call.result()
        except EngineLostError as loss:
            return loss

    return [outcome(call) for call in calls]


class LocalLearner:
    """A trainer that holds a model and sends it through the real channel."""

    def __init__(self, model: LlamaForCausalLM, plan: WeightPlan) -> None:
        self.model, self.plan = model, plan
        self.sender = SharedMemorySender(plan)
        self.damage: Callable[[int], None] = lambda index: None
        self.ranks = [self]

    def weight_plan(self, bucket_bytes: int, channel: ChannelAddress) -> WeightPlan:
        return self.plan

    def submit_fill_bucket(self, index: int) -> list[LocalCall]:
        def fill() -> dict[str, int]:
            checksums = self.sender.send(self.plan.buckets[index], dict(self.model.named_parameters()))
            self.damage(index)
            return checksums

        return [LocalCall(fill)]

    def submit(self, method: str, tokens: Any) -> LocalCall:
        def probe() -> np.ndarray:
            row = torch.from_numpy(tokens)
            with torch.no_grad():
                log_probs = self.model(row[None]).logits[0, :-1].log_softmax(-1)
            return log_probs.gather(1, row[1:, None])[:, 0].numpy()

        assert method == "probe"
        return LocalCall(probe)


def save_model(folder: Path) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    return model


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, LocalLearner, list[LocalEngine]]]:
    """A publisher, a learner whose weights are newer than the saved ones, and two engines with the saved ones."""
    model = save_model(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    channel = ChannelAddress("shared_memory", f"test-{uuid.uuid4().hex[:8]}", receivers=(0, 1))
    plan = make_plan(((n, "float32", tuple(p.shape)) for n, p in model.named_parameters()), 8_000, channel=channel)
    learner = LocalLearner(model, plan)
    monkeypatch.setattr(publisher_module, "gather", lambda calls, deadline_s: [call.result() for call in calls])
    monkeypatch.setattr(publisher_module, "outcomes", local_outcomes)
    monkeypatch.setattr(restarts_module, "wait_for_some", lambda references, timeout_s: references)
    monkeypatch.setattr(restarts_module, "fetch", lambda call, reference: call.result())
    timeline: Any = type("Timeline", (), {"add": lambda *_, **times: None})()
    restarts = EngineRestarts(LocalRestarter(), limit=1, start_timeout_s=60.0, timeline=timeline)  # type: ignore[arg-type]
    with asyncio.Runner() as runner:
        engines = []
        for index in range(2):
            spec = RolloutEngineSpec(str(tmp_path), "float32", "cpu", 64, 8, 1 << 24, 0.5, 1, 0, index)
            engines.append(LocalEngine(f"rollout engine {index}", TransformersEngine(spec), runner))
            runner.run(engines[-1].engine.start())
        publisher = WeightPublisher(
            learner,  # type: ignore[arg-type]
            engines,  # type: ignore[arg-type]
            open_channel=lambda receivers: channel,
            restarts=restarts,
            bucket_bytes=8_000,
            verify=True,
            dtype="float32",
            vocabulary_size=64,
            call_timeout_s=60,
        )
        yield publisher, learner, engines
    learner.sender.close()


def probe(engine: LocalEngine, tokens: Any) -> np.ndarray:
    return np.asarray(engine.submit("probe", tokens).result())


def test_a_publish_brings_every_engine_to_the_trainers_weights(parts: Any) -> None:
    publisher, learner, engines = parts
    before = probe(engines[0], publisher.probe_tokens)
    report = publisher.publish(3)
    assert report.probe_difference <= 1e-4
    assert report.sent_bytes == sum(4 * parameter.numel() for parameter in learner.model.parameters())
    expected = learner.submit("probe", publisher.probe_tokens).result()
    assert np.abs(before - expected).max() > 0.01
    for engine in engines:
        np.testing.assert_allclose(probe(engine, publisher.probe_tokens), expected, atol=1e-4)
        assert engine.submit("statistics").result().policy_version == 3


@pytest.mark.parametrize("method", ["begin_update", "load_bucket", "finish_update", "probe"])
def test_an_engine_that_is_lost_during_a_publish_costs_the_others_nothing_and_gets_its_weights_later(
    parts: Any, method: str
) -> None:
    publisher, learner, engines = parts
    publisher.publish(3)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.1)

    def die(*_: Any) -> None:
        raise EngineLostError(f"rollout engine 0 died during {method}")

    engines[0].faults[method] = die
    publisher.publish(4)
    assert [engine.state for engine in engines] == [EngineState.STARTING, EngineState.READY]
    assert engines[1].submit("statistics").result().policy_version == 4
    assert not publisher.bring(), "it is not there yet"
    publisher.restarts.advance()
    assert engines[0].state is EngineState.LOADED
    assert publisher.bring()
    assert [engine.state for engine in engines] == [EngineState.READY] * 2
    expected = learner.submit("probe", publisher.probe_tokens).result()
    for engine in engines:
        np.testing.assert_allclose(probe(engine, publisher.probe_tokens), expected, atol=1e-4)
        assert engine.submit("statistics").result().policy_version == 4


def test_a_publish_that_loses_its_only_engine_waits_for_the_next_one(parts: Any) -> None:
    publisher, _, engines = parts
    del engines[1]

    def die(*_: Any) -> None:
        raise EngineLostError("rollout engine 0 died")

    engines[0].faults["load_bucket"] = die
    publisher.publish(2)
    assert engines[0].state is EngineState.READY
    assert engines[0].submit("statistics").result().policy_version == 2


def test_a_byte_that_changes_on_the_way_names_engine_and_tensor(parts: Any) -> None:
    publisher, learner, _ = parts
    bucket = learner.plan.buckets[2]

    def damage(index: int) -> None:
        if index == 2:
            with segment_path(learner.plan.channel.run_id).open("r+b") as segment:
                segment.seek(bucket.tensors[0].offset)
                segment.write(b"\x01\x02\x03\x04")

    learner.damage = damage
    with pytest.raises(WeightSyncError, match=f"rollout engine 0 received weight '{bucket.tensors[0].name}' damaged"):
        publisher.publish(1)


def test_an_engine_that_computes_with_older_weights_is_found_by_the_probe(parts: Any) -> None:
    publisher, _, engines = parts
    stale = probe(engines[1], publisher.probe_tokens)
    engines[1].faults["probe"] = lambda tokens: stale
    with pytest.raises(
        WeightSyncError, match="rollout engine 1 does not compute with the trainer's weights of version"
    ):
        publisher.publish(1)


@pytest.mark.parametrize(
    ("received", "message"),
    [
        ({"a": 1}, "did not receive weight 'b'"),
        ({"a": 1, "b": 3}, "received weight 'b' damaged: checksum 0x3, expected 0x2"),
        ({"a": 1, "b": 2, "c": 3}, "received weight 'c', which the trainer did not send"),
    ],
)
def test_checksums_that_do_not_agree_name_the_tensor(received: dict[str, int], message: str) -> None:
    with pytest.raises(WeightSyncError, match=f"rollout engine 0 {message}"):
        compare_checksums({"a": 1, "b": 2}, received, "rollout engine 0")
    compare_checksums({"a": 1, "b": 2}, {"b": 2, "a": 1}, "rollout engine 0")
