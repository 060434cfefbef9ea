"""What the controller may rely on, whichever rollout engine it has. Both engines pass the same tests."""

import time
from typing import Any

import numpy as np
import pytest

from slipstream.errors import EngineError
from slipstream.rollout.messages import GroupRequest, SamplingParameters

END, SECOND_END = 257, 258
TOLERANCE = 1e-4


def request(group_id: str, *, samples: int = 4, seed: int = 0, length: int = 12) -> GroupRequest:
    """A prompt of printable bytes that depends on its group id."""
    numbers = np.random.default_rng(sum(map(ord, group_id)))
    return GroupRequest(group_id, numbers.integers(0, 90, length), samples, seed)


def sampling(tokens: int = 8, *, temperature: float = 1.0, **others: Any) -> SamplingParameters:
    return SamplingParameters(temperature=temperature, max_response_tokens=tokens, **others)


def response(sample: Any) -> tuple[int, ...]:
    return tuple(sample.tokens.tolist())


def assert_scored_by(forward: Any, model: Any, asked: GroupRequest, sample: Any, *, temperature: float = 1.0) -> None:
    whole = np.concatenate([asked.prompt_tokens, sample.tokens])
    expected = forward(model, whole, temperature)[len(asked.prompt_tokens) - 1 :]
    np.testing.assert_allclose(sample.log_probs, expected, atol=TOLERANCE)


def test_every_group_comes_back_complete_with_arrays_of_one_length(engine: Any, collect: Any) -> None:
    requests = [request(f"0-{index}", samples=1 + index, seed=10 * index) for index in range(5)]
    results = collect(engine, requests, sampling())
    assert set(results) == {asked.group_id for asked in requests}
    for asked in requests:
        assert len(results[asked.group_id].samples) == asked.samples
        for sample in results[asked.group_id].samples:
            assert 1 <= len(sample.tokens) == len(sample.log_probs) == len(sample.versions) <= 8
            assert (sample.tokens.dtype, sample.log_probs.dtype) == (np.int64, np.float32)


def test_sample_i_is_the_one_of_seed_plus_i(engine: Any, collect: Any) -> None:
    together = collect(engine, [request("a", samples=4, seed=40)], sampling())["a"].samples
    for index, sample in enumerate(together):
        alone = collect(engine, [request("a", samples=1, seed=40 + index)], sampling())["a"].samples[0]
        assert response(alone) == response(sample)


def test_samples_of_a_group_differ(engine: Any, collect: Any) -> None:
    samples = collect(engine, [request("a", samples=8)], sampling())["a"].samples
    assert len({response(sample) for sample in samples}) == 8


def test_same_seed_repeats_bit_for_bit_and_another_seed_differs(engine: Any, collect: Any) -> None:
    requests = [request(f"0-{index}", seed=100 * index) for index in range(30)]
    first, second = (collect(engine, requests, sampling()) for _ in range(2))
    others = [request(f"0-{index}", seed=100 * index + 50) for index in range(30)]
    third = collect(engine, others, sampling())
    for group_id in first:
        for one, two, other in zip(*(results[group_id].samples for results in (first, second, third)), strict=True):
            np.testing.assert_array_equal(one.tokens, two.tokens)
            np.testing.assert_array_equal(one.log_probs, two.log_probs)
            assert response(one) != response(other)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_tempered_distribution_that_was_sampled(
    engines: Any,
    kind: str,
    untied_model: Any,
    collect: Any,
    load_reference: Any,
    reference_log_probs: Any,
    temperature: float,
) -> None:
    asked = request("a", samples=8)
    results = collect(engines(kind, False), [asked], sampling(20, temperature=temperature))
    for sample in results["a"].samples:
        assert_scored_by(reference_log_probs, load_reference(untied_model), asked, sample, temperature=temperature)


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_responses_end_with_either_end_token_which_is_kept_and_scored(
    engines: Any, kind: str, untied_model: Any, collect: Any, load_reference: Any, reference_log_probs: Any
) -> None:
    requests = [request(f"0-{index}", samples=8, seed=1000 * index) for index in range(16)]
    results = collect(engines(kind, False), requests, sampling(60))
    model = load_reference(untied_model)
    ends: set[int] = set()
    for asked in requests:
        for sample in results[asked.group_id].samples:
            is_end = np.isin(sample.tokens, [END, SECOND_END])
            assert not is_end[:-1].any()
            assert sample.finish_reason == ("stop" if is_end[-1] else "length")
            assert is_end[-1] or len(sample.tokens) == 60
            if is_end[-1]:
                ends.add(int(sample.tokens[-1]))
                assert_scored_by(reference_log_probs, model, asked, sample)
    assert ends == {END, SECOND_END}


def test_a_response_is_cut_at_its_limit_or_at_the_longest_sequence(engine: Any, collect: Any) -> None:
    short, long = request("short", samples=8), request("long", samples=8, length=155)
    results = collect(engine, [short, long], sampling(12))
    cut = {
        group_id: {len(sample.tokens) for sample in result.samples if sample.finish_reason == "length"}
        for group_id, result in results.items()
    }
    assert cut == {"short": {12}, "long": {5}}


def test_greedy_takes_the_likeliest_token_with_log_probs_at_temperature_one(
    engines: Any, kind: str, untied_model: Any, collect: Any, load_reference: Any, reference_log_probs: Any
) -> None:
    import torch

    asked = request("a", samples=1)
    sample = collect(engines(kind, False), [asked], sampling(10, temperature=0.0))["a"].samples[0]
    model = load_reference(untied_model)
    assert_scored_by(reference_log_probs, model, asked, sample)
    whole = torch.from_numpy(np.concatenate([asked.prompt_tokens, sample.tokens]))
    likeliest = model(whole[None]).logits[0].argmax(-1).numpy()
    np.testing.assert_array_equal(sample.tokens, likeliest[len(asked.prompt_tokens) - 1 : -1])


def test_a_stop_string_ends_the_response_and_its_tokens_are_kept(engine: Any, collect: Any, tied_model: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tied_model)
    freely = collect(engine, [request("a", samples=16)], sampling(40))["a"].samples
    seed, free, stop = next(
        (seed, sample, text)
        for seed, sample in enumerate(freely)
        for token in sample.tokens[3:]
        if (text := tokenizer.decode([token])).isalnum() and text.isascii()
    )
    stopped = collect(engine, [request("a", samples=1, seed=seed)], sampling(40, stop=(stop,)))["a"].samples[0]
    length = next(end for end in range(1, 41) if stop in tokenizer.decode(free.tokens[:end]))
    assert response(stopped) == response(free)[:length]
    assert stopped.finish_reason == "stop"


def test_a_stop_string_in_the_prompt_does_not_end_the_response(engine: Any, collect: Any, tied_model: Any) -> None:
    from transformers import AutoTokenizer

    prompt = np.array(AutoTokenizer.from_pretrained(tied_model)("end of line")["input_ids"])
    asked = GroupRequest("a", prompt, 4, seed=3)
    free, stopped = (collect(engine, [asked], sampling(6, stop=stop))["a"].samples for stop in ((), ("line",)))
    assert [response(sample) for sample in stopped] == [response(sample) for sample in free]


def test_token_ids_that_would_be_merged_again_are_kept_as_they_are(
    engines: Any, kind: str, untied_model: Any, collect: Any, load_reference: Any, reference_log_probs: Any
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(untied_model)
    pieces = np.array(tokenizer.convert_tokens_to_ids(["he", "llo"]))
    assert tokenizer(tokenizer.decode(pieces))["input_ids"] != pieces.tolist()
    asked = GroupRequest("a", pieces, 4, seed=0)
    for sample in collect(engines(kind, False), [asked], sampling(10))["a"].samples:
        assert_scored_by(reference_log_probs, load_reference(untied_model), asked, sample)


@pytest.mark.parametrize(
    ("prompt", "samples", "temperature", "message"),
    [
        (np.zeros(160, dtype=np.int64), 2, 1.0, "the prompt has 160 tokens; expected 1 to 159"),
        (np.zeros(0, dtype=np.int64), 2, 1.0, "the prompt has 0 tokens"),
        (np.array([5, 320]), 2, 1.0, "the prompt has token ids from 5 to 320"),
        (np.array([5, 6]), 2, 0.0, "2 samples at temperature 0"),
        (np.array([5, 6]), 0, 1.0, "0 samples asked for"),
    ],
)
def test_a_request_that_cannot_be_answered_raises_at_once_and_the_engine_goes_on(
    engine: Any, collect: Any, prompt: Any, samples: int, temperature: float, message: str
) -> None:
    began = time.monotonic()
    requests = [request("good", samples=1), GroupRequest("bad", prompt, samples, 0)]
    with pytest.raises(EngineError, match=f"group bad: {message}"):
        collect(engine, requests, sampling(temperature=temperature))
    assert time.monotonic() - began < 5
    assert set(collect(engine, [request("good")], sampling())) == {"good"}


def test_two_requests_with_one_group_id_are_refused(engine: Any, collect: Any) -> None:
    with pytest.raises(EngineError, match="two requests of one call have this group id"):
        collect(engine, [request("a"), request("a")], sampling())


def test_two_calls_at_a_time_both_get_their_answers(engine: Any, run: Any) -> None:
    import asyncio

    async def both() -> list[set[str]]:
        async def one(name: str) -> set[str]:
            requests = [request(f"{name}-{index}") for index in range(4)]
            ended = [results async for results in engine.generate(requests, sampling(20))]
            return {result.group_id for results in ended for result in results}

        return await asyncio.gather(one("first"), one("second"))

    first, second = run(both())
    assert len(first) == len(second) == 4


def test_a_caller_who_leaves_early_leaves_the_engine_usable(engine: Any, run: Any, collect: Any) -> None:
    async def leave() -> None:
        stream = engine.generate([request(f"0-{index}") for index in range(20)], sampling(100))
        async for _ in stream:
            break
        await stream.aclose()

    run(leave())
    assert set(collect(engine, [request("a")], sampling())) == {"a"}


def test_statistics_count_what_was_generated(engine: Any, run: Any, collect: Any) -> None:
    before = run(engine.statistics())
    samples = collect(engine, [request("a", samples=8)], sampling())["a"].samples
    after = run(engine.statistics())
    assert after.generated_tokens - before.generated_tokens == sum(len(sample.tokens) for sample in samples)
    assert after.busy_seconds > before.busy_seconds
    assert after.memory_bytes > 50 << 20


def test_an_engine_that_was_not_started_says_so(make_spec: Any, tied_model: Any, run: Any) -> None:
    from slipstream.rollout.transformers_engine import TransformersEngine
    from slipstream.rollout.vllm_engine import VLLMEngine

    for engine_class in (TransformersEngine, VLLMEngine):
        engine = engine_class(make_spec(tied_model))
        with pytest.raises(EngineError, match="is not running"):
            run(engine.probe(np.array([1, 2, 3])))
        run(engine.shutdown())
