"""The built-in rewards for the form of a response: tags in order, length, a regular expression, JSON by a schema.

All of them read text that may hold anything. Only `regular_expression` runs a pattern that is not ours; how long it may
take is bounded by the time limit of the call.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from slipstream.rewards.fences import fenced_blocks
from slipstream.rewards.function import Score, ScoredText
from slipstream.rewards.thinking import after_thinking

DEFAULT_TAGS = ("think", "answer")
TAG_NAME = re.compile(r"[A-Za-z][\w-]*")
DEEPEST_JSON = 100
"""Levels of brackets in a JSON document; deeper ones are no answer, and would exhaust the validator's stack."""


def tag_format(text: ScoredText, *, tags: list[str] | tuple[str, ...] = DEFAULT_TAGS) -> Score:
    """Return 1.0 if the response is the tagged sections `tags`, each once and in this order, and nothing else.

    With the default that is '<think>...</think> <answer>...</answer>'. White space between and around the sections is
    allowed, empty sections are not, and no tag of the list may occur a second time anywhere. If the prompt ends with
    the first opening tag, the response may lack it. The answer is the content of the last section.
    Raises ValueError if `tags` is no list of tag names.
    """
    names = list(tags) if isinstance(tags, list | tuple) else []
    if not names or not all(isinstance(name, str) and TAG_NAME.fullmatch(name) for name in names):
        raise ValueError(f"the option tags must be a list of names such as [think, answer], found {tags!r}")
    response = text.response.strip()
    opening = f"<{names[0]}>"
    if text.prompt.rstrip().endswith(opening) and not response.startswith(opening):
        response = opening + response
    contents = _tagged_sections(response, names)
    return Score(0.0) if contents is None else Score(1.0, answer=contents[-1])


def _tagged_sections(response: str, names: list[str]) -> list[str] | None:
    """The contents of the sections, None if the response is not made of them."""
    contents = []
    position = 0
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if response.count(opening) != 1 or response.count(closing) != 1:
            return None
        start, end = response.find(opening, position), response.find(closing, position)
        content = response[start + len(opening) : end].strip()
        if start < 0 or end < start or response[position:start].strip() or not content:
            return None
        contents.append(content)
        position = end + len(closing)
    return None if response[position:].strip() else contents


def length(text: ScoredText, *, longest: int, shortest: int = 0, tolerance: int = 0) -> float:
    """Return 1.0 for a response of `shortest` to `longest` tokens, less outside, and 0.0 from `tolerance` tokens off.

    In between it falls linearly: a response that is d tokens too long or too short gets max(0, 1 - d / tolerance).
    Counted are the tokens that the policy chose, thinking and the end token included.
    Raises ValueError for a range that is none.
    """
    if not 0 <= shortest <= longest or tolerance < 0:
        raise ValueError(
            f"expected 0 <= shortest <= longest and tolerance >= 0 in tokens, found shortest {shortest}, longest "
            f"{longest}, tolerance {tolerance}"
        )
    excess = max(shortest - text.response_length, text.response_length - longest, 0)
    if excess == 0:
        return 1.0
    return max(0.0, 1.0 - excess / tolerance) if tolerance else 0.0


def regular_expression(text: ScoredText, *, pattern: str | None = None, whole: bool = False) -> Score:
    """Return 1.0 if the pattern is found in the response, or with `whole` if it matches all of it, else 0.0.

    The pattern is the option, or the label where the option is not given. '.' matches line breaks too, and white space
    around the response is not looked at. The answer is the group named 'answer' or else the first group, if there is
    one, or else the match. A pattern that backtracks without end is stopped by the time limit of the call, which then
    has failed. Raises ValueError if there is no valid pattern.
    """
    expression = _pattern(text.label if pattern is None else pattern)
    response = text.response.strip()
    match = expression.fullmatch(response) if whole else expression.search(response)
    if match is None:
        return Score(0.0)
    named = match.groupdict().get("answer")
    return Score(1.0, answer=named if named is not None else match[1] if expression.groups else match[0])


def _pattern(source: Any) -> re.Pattern[str]:
    if not isinstance(source, str) or not source:
        raise ValueError(f"the option pattern, or else the label, must be a regular expression, found {source!r}")
    try:
        return re.compile(source, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{source[:80]!r} is no regular expression: {error}") from error


def json_schema(text: ScoredText, *, schema: Mapping[str, Any] | None = None) -> Score:
    """Return 1.0 if the JSON of the response is valid by a JSON schema, else 0.0.

    The JSON is the last fenced block after the thinking, or all of that text where there is no block. Not-a-number and
    infinity, keys that occur twice, and more than 100 levels are no JSON here. The schema is the option, or the label
    where the option is not given, as a mapping or its JSON text; it may only refer to itself.
    Raises ValueError if there is no valid schema.
    """
    validator = _validator(text.label if schema is None else schema)
    found = after_thinking(text.response, text.prompt)
    if found is None:
        return Score(0.0)
    blocks = fenced_blocks(found, {"json", ""})
    source = blocks[-1] if blocks else found.strip()
    try:
        document = read_json(source)
    except ValueError:
        return Score(0.0)
    return Score(1.0 if validator.is_valid(document) else 0.0, answer=source)


def read_json(source: str) -> Any:
    """Return a JSON document, strictly read. Raises ValueError for anything else."""
    depth = deepest = 0
    for character in source:  # brackets inside texts count too: a bound, not a measure
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST_JSON:
        raise ValueError(f"more than {DEEPEST_JSON} levels of brackets")
    return json.loads(
        source, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_unique_keys
    )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite_float(numeral: str) -> float:
    number = float(numeral)
    if not math.isfinite(number):
        raise ValueError(f"{numeral[:40]} is too large")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _validator(source: Any) -> Any:
    """A validator for a schema. It fetches nothing: references lead nowhere but into the schema itself."""
    import jsonschema
    from referencing import Registry

    schema = source
    if isinstance(source, str):
        try:
            schema = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is no JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise ValueError(f"the option schema, or else the label, must be a JSON schema, found {str(source)[:80]!r}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"the JSON schema is not valid: {error.message[:200]}") from error
    return kind(schema, registry=Registry())
