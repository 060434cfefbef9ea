"""Rewards for the form of a response: tags, length, regular expressions, JSON by a schema."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.function import Score, ScoredText, resolve_reward
from slipstream.rewards.text import json_schema, length, read_json, regular_expression, tag_format


def text(response: str, label: Any = None, *, prompt: str = "", tokens: int = 1) -> ScoredText:
    return ScoredText(prompt, response, label, {}, "stop", tokens)


NASTY = [
    "<think>" * 50_000,
    "<answer>" * 50_000 + "</answer>" * 50_000,
    "```json\n" * 20_000,
    "[" * 100_000,
    '{"a":' * 100_000,
    "9" * 1_000_000,
    "\u202e\u200b\ud800\x00",
    "1e999999999",
    "[NaN, Infinity]",
]


# ---------------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>x < y and <b>bold</b></think><answer>b</answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think>so<answer>b</answer>", 0.0),
        ("Well. <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> Done.", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think><answer>a</answer></think><answer>b</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
        ("<THINK>a</THINK><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_sections_must_be_there_once_in_order_and_with_nothing_around(response: str, reward: float) -> None:
    score = tag_format(text(response))
    assert score.reward == reward
    assert score.answer == ("b" if reward else None)


def test_the_first_tag_may_stand_in_the_prompt() -> None:
    assert tag_format(text("a</think><answer>b</answer>", prompt="Go. <think>\n")).reward == 1.0
    assert tag_format(text("<think>a</think><answer>b</answer>", prompt="Go. <think>\n")).reward == 1.0
    assert tag_format(text("a</think><answer>b</answer>", prompt="Go.")).reward == 0.0


def test_other_tags() -> None:
    assert tag_format(text("<plan>a</plan> <code-1>b</code-1>"), tags=["plan", "code-1"]).reward == 1.0
    for tags in ([], "think", ["a b"], [1], ["<think>"]):
        with pytest.raises(ValueError, match="the option tags must be a list of names"):
            tag_format(text("x"), tags=tags)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " "]), max_size=8))
def test_no_more_than_one_arrangement_of_tags_is_rewarded(pieces: list[str]) -> None:
    response = "".join(pieces)
    kept = "".join(piece for piece in pieces if piece.startswith("<"))
    if tag_format(text(response)).reward == 1.0:
        assert kept == "<think></think><answer></answer>"


# ---------------------------------------------------------------------- length


@pytest.mark.parametrize(
    ("tokens", "reward"), [(0, 0.0), (5, 0.5), (10, 1.0), (15, 1.0), (20, 1.0), (25, 0.5), (30, 0.0), (900, 0.0)]
)
def test_length_falls_linearly_outside_of_the_range(tokens: int, reward: float) -> None:
    assert length(text("", tokens=tokens), shortest=10, longest=20, tolerance=10) == reward


def test_without_tolerance_the_range_is_sharp() -> None:
    assert [length(text("", tokens=n), longest=3) for n in (0, 3, 4)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("options", [{"longest": -1}, {"longest": 2, "shortest": 3}, {"longest": 2, "tolerance": -1}])
def test_a_range_that_is_none_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="0 <= shortest <= longest"):
        length(text(""), **options)


@given(st.integers(0, 200), st.integers(0, 100), st.integers(0, 100), st.integers(0, 50))
def test_length_is_a_share_and_1_exactly_in_the_range(tokens: int, low: int, more: int, tolerance: int) -> None:
    reward = length(text("", tokens=tokens), shortest=low, longest=low + more, tolerance=tolerance)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (low <= tokens <= low + more)


# ---------------------------------------------------------------------- regular expression


def test_a_pattern_is_searched_or_must_match_all() -> None:
    assert regular_expression(text("I say 42."), pattern=r"\d+") == Score(1.0, answer="42")
    assert regular_expression(text("I say 42."), pattern=r"\d+", whole=True) == Score(0.0)
    assert regular_expression(text(" 42\n"), pattern=r"\d+", whole=True) == Score(1.0, answer="42")
    assert regular_expression(text("a\nb"), pattern="a.b", whole=True).reward == 1.0
    assert regular_expression(text("x=1, y=2"), pattern=r"x=(\d).*y=(?P<answer>\d)").answer == "2"
    assert regular_expression(text("x=1"), pattern=r"x=(\d)").answer == "1"
    assert regular_expression(text("ab"), pattern="a(c)?b") == Score(1.0, answer=None)


def test_the_label_is_the_pattern_where_there_is_no_option() -> None:
    assert regular_expression(text("yes!", "yes|no")).reward == 1.0
    assert regular_expression(text("yes!", "no"), pattern="yes").reward == 1.0


@pytest.mark.parametrize("pattern", [None, 7, "", "(", "a" * 10 + "[", "(" * 10_000 + ")" * 10_000])
def test_what_is_no_pattern_is_refused(pattern: Any) -> None:
    with pytest.raises(ValueError, match="regular expression"):
        regular_expression(text("x", pattern))


def test_a_pattern_that_backtracks_for_ever_is_stopped_by_the_limit_of_the_call(
    with_pool: Any, trajectory: Any
) -> None:
    async def use(pool: Any) -> Any:
        return await pool.score([trajectory("a" * 60 + "b"), trajectory("aa")])

    options = {"pattern": "(a|a|b?)+c|^aa$"}
    slow, quick = with_pool("", use, function="regular_expression", options=options, timeout_s=0.5)
    assert slow.reward is None and str(slow.failure).startswith("timed out")
    assert quick.reward == 1.0


# ---------------------------------------------------------------------- JSON

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('Here:\n```json\n{"name": "Ada"}\n```\nDone.', 1.0),
        ('```\n{"name": "Ada"}\n```', 1.0),
        ('```json\n{}\n```\n```json\n{"name": "Ada"}\n```', 1.0),
        ('```json\n{"name": "Ada"}\n```\n```json\n{}\n```', 0.0),  # the last block counts
        ('<think>{"name": 1}</think>{"name": "Ada"}', 1.0),
        ('<think>{"name": "Ada"}', 0.0),
        ('Here: {"name": "Ada"}', 0.0),
        ('{"name": 1}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "more": 1}', 0.0),
        ('{"name": "Ada", "name": "Bob"}', 0.0),
        ("{'name': 'Ada'}", 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "age": 1e999}', 0.0),
        ("", 0.0),
    ],
)
def test_the_json_of_a_response_must_be_valid_by_the_schema(response: str, reward: float) -> None:
    assert json_schema(text(response), schema=SCHEMA).reward == reward
    assert json_schema(text(response, SCHEMA)).reward == reward
    assert json_schema(text(response, json.dumps(SCHEMA))).reward == reward


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "must be a JSON schema, found 'None'"),
        ("{", "the schema is no JSON"),
        ("[" * 100_000, "the schema is no JSON"),
        ("[1]", "must be a JSON schema"),
        ({"type": "thing"}, "the JSON schema is not valid"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        json_schema(text("{}", schema))


def test_a_schema_refers_to_itself_and_fetches_nothing() -> None:
    tree = {"type": "object", "additionalProperties": {"$ref": "#"}}
    assert json_schema(text('{"a": {"b": {}}}', tree)).reward == 1.0
    assert json_schema(text('{"a": {"b": 1}}', tree)).reward == 0.0
    with pytest.raises(Exception, match="/schema"):
        json_schema(text("{}", {"$ref": "http://127.0.0.1:9/schema"}))


def test_nesting_is_bounded_before_anything_is_built() -> None:
    assert read_json("[" * 100 + "]" * 100)
    with pytest.raises(ValueError, match="more than 100 levels"):
        read_json("[" * 101 + "]" * 101)


@pytest.mark.parametrize("response", NASTY, ids=range(len(NASTY)))
def test_nasty_texts_earn_nothing_and_raise_nothing(response: str) -> None:
    assert tag_format(text(response)).reward == 0.0
    assert json_schema(text(response), schema={"type": "object"}).reward == 0.0
    assert regular_expression(text(response), pattern="no such thing").reward == 0.0


@given(st.text())
def test_any_text_is_a_score(response: str) -> None:
    for score in (tag_format(text(response)), json_schema(text(response), schema={})):
        assert score.reward in (0.0, 1.0)


@pytest.mark.parametrize("name", ["format", "length", "regular_expression", "json_schema"])
def test_they_have_names(name: str) -> None:
    assert resolve_reward(name).__module__ == "slipstream.rewards.text"
