"""Scoring texts for a service: by a function, by a reward model in batches, by both."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.schema import RewardConfig
from slipstream.data.failure import FailureKind
from slipstream.errors import ConfigError
from slipstream.rewards import text_scorer
from slipstream.rewards.function import ScoredText
from slipstream.rewards.model import RewardModel, RewardModelSpec
from slipstream.rewards.text_scorer import ModelBatches, TextScorer


@pytest.fixture
def spec(tiny_reward_model: Path) -> RewardModelSpec:
    path = str(tiny_reward_model)
    return RewardModelSpec(path, path, dtype="float32", threads=1, normalize=False)


def text(response: str, *, prompt: str = "What is 1 + 1?", label: str = "2", finish_reason: str = "stop") -> ScoredText:
    return ScoredText(prompt, response, label, {}, finish_reason, 0)


def use(scorer: Any, action: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            await scorer.start()
            return await action(scorer)
        finally:
            await scorer.close()

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_a_text_gets_the_score_of_its_tokens_with_an_end_if_it_is_finished(
    spec: RewardModelSpec, tiny_tokenizer: Any
) -> None:
    model = RewardModel(spec)
    model.load()
    prompt, response = (tiny_tokenizer(each, add_special_tokens=False)["input_ids"] for each in ("What is", " 2"))
    sequences = [[*prompt, *response, tiny_tokenizer.eos_token_id], [*prompt, *response]]
    expected = model.scores([np.array(sequence) for sequence in sequences])

    async def both(batches: ModelBatches) -> list[Any]:
        finished, cut = text(" 2", prompt="What is"), text(" 2", prompt="What is", finish_reason="length")
        return [await batches.score(finished), await batches.score(cut)]

    results = use(ModelBatches(spec, on_batch=lambda _: None), both)
    assert [result.reward for result in results] == pytest.approx(expected, rel=1e-5)
    assert results[0].reward != results[1].reward


def test_what_comes_while_the_model_computes_is_scored_in_one_batch(
    spec: RewardModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_scorer, "LARGEST_BATCH", 4)
    sizes: list[int] = []

    async def many(batches: ModelBatches) -> list[Any]:
        alone = [await batches.score(text(str(number))) for number in range(9)]
        together = await asyncio.gather(*(batches.score(text(str(number))) for number in range(9)))
        return [alone, together]

    alone, together = use(ModelBatches(spec, on_batch=sizes.append), many)
    assert sizes[:9] == [1] * 9 and sizes[9:] == [4, 4, 1]
    rewards = [[result.reward for result in results] for results in (alone, together)]
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-5), "each has its own score"
    assert len(set(rewards[0])) == 9


def test_a_text_that_is_too_long_or_empty_fails_alone(spec: RewardModelSpec) -> None:
    async def score(batches: ModelBatches) -> list[Any]:
        empty = text("", prompt="", finish_reason="length")
        return await asyncio.gather(*map(batches.score, (text("2" * 80), empty, text("2"))))

    long, empty, fine = use(ModelBatches(spec, on_batch=lambda _: None), score)
    assert long.failure.kind is empty.failure.kind is FailureKind.RAISED
    assert "expected 1 to 64" in long.failure.message and fine.reward is not None


def test_a_model_that_breaks_down_breaks_those_who_asked_and_goes_on(spec: RewardModelSpec) -> None:
    async def score(batches: ModelBatches) -> Any:
        original = batches._model.score

        def break_down(_: Any) -> Any:
            raise RuntimeError("no memory")

        batches._model.score = break_down  # type: ignore[method-assign]
        failed = await asyncio.gather(*(batches.score(text("2")) for _ in range(3)), return_exceptions=True)
        batches._model.score = original  # type: ignore[method-assign]
        return failed, await batches.score(text("2"))

    failed, fine = use(ModelBatches(spec, on_batch=lambda _: None), score)
    assert [str(error) for error in failed] == ["no memory"] * 3 and fine.reward is not None


def test_who_has_gone_is_left_out_of_the_batch(spec: RewardModelSpec) -> None:
    sizes: list[int] = []

    async def score(batches: ModelBatches) -> Any:
        tasks = [asyncio.create_task(batches.score(text(str(number)))) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = use(ModelBatches(spec, on_batch=sizes.append), score)
    assert sum(sizes) == 3 and isinstance(results[1], asyncio.CancelledError)


def test_a_function_and_a_model_are_added(spec: RewardModelSpec) -> None:
    config = RewardConfig(function="exact_match", model=spec.path)

    async def score(scorer: TextScorer) -> Any:
        return await scorer.score(text("2"))

    both = use(TextScorer(config, spec, on_batch=lambda _: None), score)
    alone = use(TextScorer(config.model_copy(update={"function": None}), spec, on_batch=lambda _: None), score)
    assert both.reward == pytest.approx(alone.reward + 1.0)
    assert both.parts["function"] == 1.0 and both.parts["model"] == alone.reward


def test_a_function_that_does_not_exist_is_named_at_the_start() -> None:
    scorer = TextScorer(RewardConfig(function="json:nothing"), None, on_batch=lambda _: None)
    with pytest.raises(ConfigError, match="nothing"):
        use(scorer, lambda _: asyncio.sleep(0))
