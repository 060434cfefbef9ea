"""Reward functions of other trainers, unchanged. The signatures are those of their documentation and examples:

TRL, "Using a custom reward function" of the GRPO trainer; OpenRLHF, examples/python/reward_func.py and
math_reward_func.py; verl, "Implement reward function for dataset".
"""

import asyncio
import functools
import inspect
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.turn import Turn
from slipstream.errors import ConfigError
from slipstream.rewards.conventions import adapt, check_options, recognise
from slipstream.rewards.function import Score, ScoredText, UnusableRewardError, check_reward_value

MESSAGES = [{"role": "user", "content": "1 + 1?"}]


def make_text(response="#### 2", *, label="2", prompt="<user>1 + 1?<assistant>", **fields) -> ScoredText:
    turns = (Turn("prompt", prompt), Turn("assistant", response))
    return ScoredText(prompt, response, label, fields, "stop", 3, turns, (7, 8, 9))


def scored(function, text, **options) -> Score:
    """What the pool would make of a call, without the pool."""
    check_options(function, options)
    value = adapt(function)(text, **options)
    return check_reward_value(asyncio.run(value) if inspect.isawaitable(value) else value)


# ---------------------------------------------------------------- told apart


def own(text, *, longest=3):
    return 1.0


async def own_async(scored_text):
    return 1.0


class Own:
    def __call__(self, text):
        return 1.0


def trl(prompts, completions, **kwargs):
    return [1.0]


def trl_without_prompts(completions, ground_truth, **kwargs):
    return [1.0]


def openrlhf(queries, prompts, labels):
    return torch.tensor([1.0])


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def undecorated(function):
    """As a decorator that uses functools.wraps."""
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


@pytest.mark.parametrize(
    ("function", "trainer"),
    [
        (own, None),
        (own_async, None),
        (Own(), None),
        (lambda *args: 1.0, None),
        (lambda text, **kwargs: 1.0, None),
        (undecorated(own), None),
        (undecorated(trl), "TRL"),
        (lambda completion_ids, **kwargs: [1.0], "TRL"),  # its own get_soft_overlong_punishment
        (functools.partial(own, longest=4), None),
        (len, None),
        (trl, "TRL"),
        (trl_without_prompts, "TRL"),
        (lambda completions, prompts=None, **kwargs: [1.0], "TRL"),
        (openrlhf, "OpenRLHF"),
        (lambda queries, prompts, labels, **kwargs: [1.0], "OpenRLHF"),
        (verl, "verl"),
        (lambda solution_str, ground_truth, **kwargs: 1.0, "verl"),
    ],
)
def test_the_parameters_tell_which_form_a_function_has(function, trainer):
    found = recognise(function)
    assert (found and found.trainer) == trainer
    if function is not len:
        assert scored(function, make_text(ground_truth="2")).reward == 1.0


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            lambda completions, queries: 1.0,
            r"completions, queries\) has parameters of TRL and OpenRLHF; expected one of",
        ),
        (lambda prompts, responses: 1.0, r"\(prompts, responses\) has none that tells its form; expected one of"),
        (lambda data_source, solution: 1.0, "none that tells its form"),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: [1.0], "none that tells its form"),
        (lambda **kwargs: 1.0, r"\(kwargs\) has none that tells its form"),
        (lambda *args, **kwargs: 1.0, "none that tells its form"),
        (lambda prompt, response, **kwargs: 1.0, "none that tells its form"),
    ],
)
def test_a_function_of_no_clear_form_is_an_error_that_lists_the_forms(function, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        recognise(function)
    for form in ("(text, **options) as in Slipstream", "(prompts, completions, completion_ids, **columns) as in TRL",
                 "(queries, prompts, labels) as in OpenRLHF",
                 "(data_source, solution_str, ground_truth, extra_info) as in verl"):  # fmt: skip
        assert form in str(caught.value)


# ---------------------------------------------------------------- TRL


def record(into):
    """A function of TRL's form that notes how it was called."""

    def reward(prompts, completions, **kwargs):
        into.update(kwargs, prompts=prompts, completions=completions)
        return [0.5]

    return reward


def test_trl_gets_lists_of_one_and_every_column_under_its_name():
    seen = {}
    score = scored(record(seen), make_text(prompt="rendered", level=3, tags=["a"]))
    assert score == Score(0.5)
    assert seen == {
        "prompts": ["rendered"],
        "completions": ["#### 2"],
        "completion_ids": [[7, 8, 9]],
        "level": [3],
        "tags": [["a"]],
    }


def test_trl_gets_messages_for_messages_and_the_rendered_prompt_where_no_column_is_called_prompt():
    seen = {}
    scored(record(seen), ScoredText("rendered", "2", None, {"prompt": MESSAGES}, "stop", 1))
    assert seen["prompts"] == [MESSAGES]
    assert seen["completions"] == [[{"role": "assistant", "content": "2"}]]
    scored(record(seen), ScoredText("rendered", "2", None, {"prompt": "1 + 1?"}, "stop", 1))
    assert (seen["prompts"], seen["completions"]) == (["1 + 1?"], ["2"]), "the row's own text"


def test_trl_examples_of_its_documentation_run_unchanged():
    def reward_len(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    def format_reward(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if content.startswith("<think>") else 0.0 for content in contents]

    async def async_reward(prompts, completions, ground_truth, **kwargs):
        await asyncio.sleep(0)
        return [1.0 if truth in completion else 0.0 for completion, truth in zip(completions, ground_truth)]  # noqa: B905

    assert scored(reward_len, make_text("four")).reward == 4.0
    assert scored(format_reward, ScoredText("p", "<think>", None, {"prompt": MESSAGES}, "stop", 1)).reward == 1.0
    assert scored(async_reward, make_text("it is 2", ground_truth="2")).reward == 1.0


def test_a_column_that_the_row_lacks_is_named():
    def reward(completions, solution, **kwargs):
        return [1.0]

    with pytest.raises(
        TypeError, match=r"asks for solution, which is neither a column of the row \(level\) nor one of"
    ):
        scored(reward, make_text(level=1))
    assert scored(reward, make_text(level=1), solution=["2"]).reward == 1.0


@pytest.mark.parametrize("name", ["trainer_state", "log_extra", "log_metric"])
def test_what_only_its_own_trainer_has_is_refused_at_the_start_and_may_have_a_default(name):
    required = eval(f"lambda completions, {name}, **kwargs: [1.0]")
    with pytest.raises(ConfigError, match=f"asks for {name}, which Slipstream does not pass"):
        check_options(required, {})
    assert scored(eval(f"lambda completions, {name}=None, **kwargs: [1.0]"), make_text()).reward == 1.0


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([None], "returned None, expected one number"),
        ([float("nan")], "returned nan"),
        ([], "returned 0 values for one response"),
        ([1.0, 0.0], "returned 2 values for one response"),
        (None, "returned None"),
        (["1.0"], "returned the string"),
    ],
)
def test_not_applicable_and_what_is_no_list_of_one_number_is_no_reward(returned, problem):
    with pytest.raises(UnusableRewardError, match=problem):
        scored(lambda completions, **kwargs: returned, make_text())


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_one_number_is_the_same_however_it_is_wrapped(number):
    for value in ([number], (number,), np.array([number]), torch.tensor([number], dtype=torch.float64), number):
        assert scored(lambda completions, value=value: value, make_text()).reward == number
        assert scored(lambda queries, value=value: value, make_text()).reward == number


@pytest.mark.parametrize("value", [torch.tensor([0.5]), np.array([[0.5]]), [torch.tensor([0.5])]])
def test_an_array_of_one_element_is_its_number(value):
    assert scored(lambda solution_str: value, make_text()).reward == 0.5
    assert scored(lambda solution_str: {"score": value, "acc": value}, make_text()) == Score(0.5, {"acc": 0.5})
    assert scored(lambda queries: value, make_text()).reward == 0.5
    with pytest.raises(UnusableRewardError):
        scored(lambda solution_str: torch.tensor([0.5, 0.5]), make_text())


# ---------------------------------------------------------------- OpenRLHF


def test_openrlhf_gets_prompt_and_response_as_one_text():
    seen = {}

    def reward_func(queries, prompts, labels, **kwargs):
        seen.update(kwargs, queries=queries, prompts=prompts, labels=labels)
        return torch.randint(1, 2, (len(queries),)).float()

    assert scored(reward_func, make_text(prompt="<p>", label="2", level=3)) == Score(1.0)
    assert seen == {"queries": ["<p>#### 2"], "prompts": ["<p>"], "labels": ["2"]}


def test_openrlhf_may_return_a_dict_whose_logs_become_named_parts():
    def reward_func(queries, prompts, labels):
        right = torch.tensor([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
        logs = {"accuracy": right.mean(), "reward": right, "names": ["a"], "nan": [float("nan")]}
        return {"rewards": 2 * right, "scores": right, "extra_logs": logs}

    assert scored(reward_func, make_text()) == Score(2.0, {"scores": 1.0, "accuracy": 1.0})
    with pytest.raises(UnusableRewardError, match="returned a dict with reward, expected 'rewards'"):
        scored(lambda queries, prompts, labels: {"reward": 1.0}, make_text())


# ---------------------------------------------------------------- verl


def test_verl_gets_its_columns_and_the_ground_truth_within_the_label():
    seen = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.update(data_source=data_source, solution=solution_str, truth=ground_truth, extra=extra_info)
        return ground_truth in solution_str

    label = {"style": "rule", "ground_truth": "2"}
    row = {"data_source": "openai/gsm8k", "extra_info": {"index": 4}, "reward_model": label}
    assert scored(compute_score, make_text(label=label, **row)) == Score(1.0)
    assert seen == {"data_source": "openai/gsm8k", "solution": "#### 2", "truth": "2",
                    "extra": {"index": 4, "num_turns": 2, "rollout_reward_scores": {}}}  # fmt: skip
    scored(compute_score, make_text(label="2"))
    assert seen == {"data_source": "", "solution": "#### 2", "truth": "2",
                    "extra": {"num_turns": 2, "rollout_reward_scores": {}}}  # fmt: skip
    assert scored(lambda solution_str, data_source: len(data_source), make_text(), data_source="mine").reward == 4.0


def test_verl_may_return_a_dict_whose_numbers_become_parts_and_whose_pred_is_the_answer():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": -1.0, "acc": False, "pred": "3", "comment": "wrong", "lengths": [1, 2]}

    assert scored(compute_score, make_text()) == Score(-1.0, {"acc": 0.0}, "3")
    numbers = {"score": np.float32(1), "acc": np.bool_(True), "nan": float("nan"), "inf": torch.tensor(torch.inf)}
    assert scored(lambda solution_str: numbers, make_text()) == Score(1.0, {"acc": 1.0})
    with pytest.raises(UnusableRewardError, match="returned a dict with acc, expected 'score'"):
        scored(lambda solution_str: {"acc": 1.0}, make_text())


def test_verl_may_be_a_coroutine_function():
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 1.0}

    assert scored(compute_score, make_text()).reward == 1.0


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [
        (openrlhf, {"scale": 2}, r"openrlhf\(labels, prompts, queries\) has no parameter 'scale'"),
        (
            lambda queries, model: 1.0,
            {},
            r"asks for model, which Slipstream does not pass .* OpenRLHF; give it a default",
        ),
        (lambda solution_str, reward_router_address: 1.0, {}, "asks for reward_router_address"),
    ],
)
def test_options_must_fit_the_form(function, options, problem):
    with pytest.raises(ConfigError, match=problem):
        check_options(function, options)


def test_options_are_keyword_arguments_in_every_form():
    assert scored(lambda completions, scale, **kwargs: [scale], make_text(), scale=2).reward == 2.0
    assert scored(lambda queries, scale: [scale], make_text(), scale=2).reward == 2.0
    assert scored(lambda solution_str, scale: scale, make_text(), scale=2).reward == 2.0
    assert scored(lambda completions, level, **kwargs: level, make_text(level=1), level=[5]).reward == 5.0


# ---------------------------------------------------------------- in the pool


def test_one_bad_response_of_a_function_that_takes_lists_fails_alone(score):
    source = textwrap.dedent("""
        async def reward(prompts, completions, completion_ids, **columns):
            assert prompts == ["1 + 1 ="] and completion_ids == [[2, 3]]
            return [{"2": 1.0, "3": 0.0, "?": None}[text] for text in completions]
    """)
    results = score(source, "2", "?", "oops", "3")
    assert [result.reward for result in results] == [1.0, None, None, 0.0]
    assert str(results[1].failure) == "returned None, expected one number"
    assert str(results[2].failure).startswith("raised: KeyError: 'oops'")
    assert not results[0].reads_answers


def test_an_unclear_function_stops_the_start(with_pool):
    with pytest.raises(ConfigError, match=r"reward\(completions, queries\) has parameters of TRL and OpenRLHF"):
        with_pool("def reward(completions, queries): return 1.0", lambda pool: pool.start())
