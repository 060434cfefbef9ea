"""The reward model at work: the scores Transformers gives, whatever is scored beside them, and clear refusals."""

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from slipstream.config.reward_model import SCORE_MOMENTS
from slipstream.config.schema import RewardConfig
from slipstream.data.failure import FailureKind, RewardFailure
from slipstream.data.trajectory import Trajectory
from slipstream.errors import ModelError
from slipstream.rewards import model as model_module
from slipstream.rewards.child import RewardResult
from slipstream.rewards.engine import RewardEngine, add_results
from slipstream.rewards.model import RewardModel, RewardModelSpec

SEQUENCES = [np.random.default_rng(length).integers(1, 260, length) for length in (4, 9, 9, 23, 2)]


@pytest.fixture
def spec(tiny_reward_model: Path, tiny_policy: Path) -> RewardModelSpec:
    return RewardModelSpec(str(tiny_reward_model), str(tiny_policy), dtype="float32", threads=1, normalize=False)


@pytest.fixture
def load(spec: RewardModelSpec) -> Callable[..., RewardModel]:
    """load(**changes of the spec): a loaded reward model."""

    def make(**changes) -> RewardModel:
        model = RewardModel(replace(spec, **changes))
        model.load()
        return model

    return make


def plain_scores(folder: Path) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.as_tensor(tokens).unsqueeze(0)).logits.item() for tokens in SEQUENCES]


def test_scores_are_those_of_transformers(load, tiny_reward_model):
    assert load().scores(SEQUENCES) == pytest.approx(plain_scores(tiny_reward_model), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("tokens_per_batch", [1, 20, 10_000])
def test_a_score_depends_neither_on_what_is_scored_beside_it_nor_on_the_batches(load, tokens_per_batch, monkeypatch):
    model = load()
    alone = [model.scores([tokens])[0] for tokens in SEQUENCES]
    monkeypatch.setattr(model_module, "TOKENS_PER_BATCH", tokens_per_batch)
    assert model.scores(SEQUENCES) == pytest.approx(alone, rel=1e-5, abs=1e-6)
    assert model.scores(SEQUENCES[::-1])[::-1] == pytest.approx(alone, rel=1e-5, abs=1e-6)
    assert model.scores(SEQUENCES) == model.scores(SEQUENCES), "bit for bit"
    assert model.scores([]) == []


def test_normalized_scores_are_relative_to_the_moments_stored_with_the_model(load):
    plain, normalized = load().scores(SEQUENCES), load(normalize=True).scores(SEQUENCES)
    assert normalized == pytest.approx([(score - 2.0) / 4.0 for score in plain])


def test_scoring_needs_no_gradient(load):
    model = load()
    model.scores(SEQUENCES)
    assert not any(parameter.requires_grad for parameter in model._module.parameters())


def test_a_score_that_is_no_number_is_a_failure_and_never_0(load, trajectory):
    model = load()
    with torch.no_grad():
        model._module.model.get_decoder().embed_tokens.weight[200] = math.nan
    good, bad = trajectory("fine"), replace_tokens(trajectory("bad"), [5, 200, 7])
    first, second, third = model.score([good, bad, good])
    expected = "returned nan by the reward model, expected a finite number"
    assert second.reward is None and second.failure == RewardFailure(FailureKind.RETURNED, expected)
    # The same sequence at another place of the row: sums are taken in another order.
    assert first.reward == pytest.approx(third.reward, rel=1e-5) and first.parts == {"model": first.reward}


def replace_tokens(trajectory: Trajectory, tokens: list[int]) -> Trajectory:
    return replace(trajectory, tokens=np.array(tokens), loss_mask=np.arange(len(tokens)) > 0)


def copied(folder: Path, to: Path, **settings) -> str:
    """A copy of a model folder with other settings in its config.json; those that are None are taken out."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    changed = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
    return str(to)


def test_what_cannot_score_is_refused(load, tiny_policy, tiny_reward_model, tmp_path):
    with pytest.raises(ModelError, match=r"^reward\.model: .* is LlamaForCausalLM, no reward model; expected"):
        load(path=str(tiny_policy))
    several = copied(tiny_reward_model, tmp_path / "several", id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    with pytest.raises(ModelError, match=r"^reward\.model: .* is a classifier with 2 labels"):
        load(path=several)
    with pytest.raises(ModelError, match=r"^reward\.model: no folder './nowhere'"):
        load(path="./nowhere")
    bare = copied(tiny_reward_model, tmp_path / "bare", **{SCORE_MOMENTS: None})
    load(path=bare)
    for stored in (None, {"mean": 0.0, "std": 0.0}, {"mean": 0.0}, 3):
        path = copied(tiny_reward_model, tmp_path / f"moments-{stored}", **{SCORE_MOMENTS: stored})
        with pytest.raises(ModelError, match=r"^reward\.normalize_model_scores: .* no usable score_moments"):
            load(path=path, normalize=True)


def test_a_model_that_reads_other_tokens_than_the_policy_writes_is_refused(load, tiny_reward_model, tmp_path):
    from slipstream.data.tokenizer import train_tokenizer

    path = copied(tiny_reward_model, tmp_path / "other")
    train_tokenizer(["quite another text, and again: quite another text"] * 3, 300).save_pretrained(path)
    with pytest.raises(
        ModelError, match=r"^reward\.model: the tokenizer of .* has other tokens than that of model\.path"
    ):
        load(path=path)
    for file in Path(path).glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"^reward\.model: no tokenizer in "):
        load(path=path)


def scored(
    config: RewardConfig, spec: RewardModelSpec, trajectories: list[Trajectory], folder: Path
) -> list[RewardResult]:
    """What a reward engine with a model makes of trajectories."""

    async def main() -> list[RewardResult]:
        engine = RewardEngine(config, None, str(folder), spec)
        try:
            await engine.start()
            first, again = await asyncio.gather(engine.score(trajectories), engine.score(trajectories))
            assert [result.reward for result in first] == [result.reward for result in again]
            return first
        finally:
            await engine.shutdown()

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_a_model_alone_needs_no_function(spec, load, trajectory, tmp_path):
    given = [trajectory("a"), replace_tokens(trajectory("b"), [1, 2, 3])]
    found = scored(RewardConfig(model=spec.path), spec, given, tmp_path)
    assert [result.reward for result in found] == load().scores([t.tokens for t in given])


def test_each_response_is_scored_on_its_own_whatever_is_scored_beside_it(spec, load, trajectory, tmp_path):
    """As the controller asks: one call for each response that has ended. Bit for bit, in whatever order they come."""
    model = load()
    given = [replace_tokens(trajectory(str(number)), tokens.tolist()) for number, tokens in enumerate(SEQUENCES)]
    alone = [model.scores([tokens])[0] for tokens in SEQUENCES]

    async def main() -> None:
        engine = RewardEngine(RewardConfig(model=spec.path), None, str(tmp_path), spec)
        try:
            await engine.start()
            for order in (range(len(given)), reversed(range(len(given)))):
                indices = list(order)
                results = await asyncio.gather(*(engine.score([given[index]]) for index in indices))
                assert [result.reward for [result] in results] == [alone[index] for index in indices]
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_model_and_a_function_are_added_and_a_failure_of_either_is_one_of_both(spec, load, trajectory, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def reward(text):\n    return {'long': len(text.response), 'odd': 1 / (len(text.response) % 2)}\n"
    )
    config = RewardConfig(model=spec.path, function="reward.py:reward", on_failure="drop_group")
    odd, even = trajectory("abc"), trajectory("ab")
    first, second = scored(config, spec, [odd, even], tmp_path)
    [score] = load().scores([odd.tokens])
    assert first.reward == score + 4.0
    assert first.parts == {"model": score, "function": 4.0, "function/long": 3.0, "function/odd": 1.0}
    assert second.reward is None and str(second.failure).startswith("raised: ZeroDivisionError")
    failure = RewardFailure(FailureKind.RETURNED, "returned nan")
    lost = add_results(RewardResult(None, failure=failure), RewardResult(1.0))
    assert (lost.reward, lost.failure) == (None, failure)


# ---------------------------------------------------------------------- process reward models


@pytest.fixture
def answer(trajectory, tiny_tokenizer) -> Callable[[str], Trajectory]:
    """answer(text): a trajectory whose policy wrote `text`."""

    def make(text: str) -> Trajectory:
        prompt, response = (tiny_tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("<|user|>q", text))
        tokens = np.array(prompt + response)
        return replace(trajectory(text), tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt))

    return make


def plain_step_scores(folder: Path, tokens: np.ndarray, places: list[int]) -> list[float]:
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.as_tensor(tokens).unsqueeze(0)).logits[0, places, 0].tolist()


def test_steps_are_read_at_their_last_tokens_and_give_what_transformers_gives(
    load, answer, tiny_process_reward_model, tiny_tokenizer
):
    model = load(path=str(tiny_process_reward_model), step_aggregation="min")
    trajectories = [answer("1 + 2 = 3\n\n3 + 4 = 7<|end|>"), answer("12"), answer("<|end|>"), answer("1\n\n2\n\n3")]
    found = model.step_scores(trajectories)
    assert [len(scores) for scores in found] == [2, 1, 0, 3]
    tokens = trajectories[0].tokens
    separator = len(answer("1 + 2 = 3\n\n").tokens) - 1
    assert tiny_tokenizer.decode(tokens[: separator + 1]).endswith("= 3\n\n")
    expected = plain_step_scores(tiny_process_reward_model, tokens, [separator, len(tokens) - 1])
    assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert [model.step_scores([each])[0] for each in trajectories] == [
        pytest.approx(scores, rel=1e-5, abs=1e-6) for scores in found
    ]


@pytest.mark.parametrize(("how", "reduce"), [("min", min), ("product", math.prod), ("mean", np.mean)])
def test_the_reward_is_made_of_the_probabilities_of_the_steps(load, answer, tiny_process_reward_model, how, reduce):
    model = load(path=str(tiny_process_reward_model), step_aggregation=how)
    trajectories = [answer("1 + 2 = 3\n\n3 + 4 = 7<|end|>"), answer(" \n\n<|end|>")]
    [scores, _] = model.step_scores(trajectories)
    probabilities = [1 / (1 + math.exp(-score)) for score in scores]
    result, empty = model.score(trajectories)
    assert result.reward == pytest.approx(reduce(probabilities))
    assert result.parts == {
        "model": result.reward,
        "model/steps": 2.0,
        "model/lowest_step": pytest.approx(min(probabilities)),
    }
    assert empty.reward == 0.0 and empty.parts == {"model": 0.0, "model/steps": 0.0, "model/lowest_step": 0.0}


def test_a_step_score_that_is_no_number_is_a_failure(load, answer, tiny_process_reward_model):
    model = load(path=str(tiny_process_reward_model), step_aggregation="last")
    with torch.no_grad():
        model._module.head.bias.fill_(math.nan)
    [result] = model.score([answer("1\n\n2")])
    assert result.reward is None and "returned nan by the reward model" in str(result.failure)


def test_what_scores_steps_and_what_scores_answers_are_not_confused(
    load, tiny_policy, tiny_reward_model, tiny_process_reward_model, tmp_path
):
    process = str(tiny_process_reward_model)
    with pytest.raises(ModelError, match=r"is a process reward model, .*; set reward\.step_aggregation"):
        load(path=process)
    with pytest.raises(ModelError, match=r"reward model of whole answers, .*; remove reward\.step_aggregation"):
        load(path=str(tiny_reward_model), step_aggregation="min")
    with pytest.raises(ModelError, match=r"^reward\.model: .* is LlamaForCausalLM, no process reward model"):
        load(path=str(tiny_policy), step_aggregation="min")
    for number, stored in enumerate((None, "", 3)):
        path = copied(tiny_process_reward_model, tmp_path / str(number), step_separator=stored)
        with pytest.raises(ModelError, match=r"does not say what stands between steps \(found step_separator"):
            load(path=path, step_aggregation="min")


def test_steps_and_a_function_are_added_with_the_parts_of_both(spec, answer, tiny_process_reward_model, tmp_path):
    (tmp_path / "reward.py").write_text("def reward(text):\n    return {'one': 1.0}\n")
    path = str(tiny_process_reward_model)
    config = RewardConfig(model=path, step_aggregation="min", function="reward.py:reward")
    [result] = scored(config, replace(spec, path=path, step_aggregation="min"), [answer("1\n\n2")], tmp_path)
    assert result.reward == pytest.approx(result.parts["model"] + 1.0)
    assert result.parts.keys() == {"model", "model/steps", "model/lowest_step", "function", "function/one"}
