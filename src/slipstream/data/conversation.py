"""Conversations to imitate become training examples whose loss covers the assistant's text and nothing else.

Stands between `data/source.py` and the SFT workflow. A row is either a prompt and a response, or a list of chat
messages all of whose assistant turns are learned.

The loss mask comes from the final render. Chat templates rewrite earlier turns (Qwen3 drops their thinking), so a
span measured on a partial render can lie elsewhere in the final one; and a text tokenized in pieces can differ from
the same text tokenized whole. Hence: render the whole conversation once, find where each assistant text begins in
that render, tokenize the whole once, and refuse a row (counted, with its number) where a boundary does not fall
between two tokens. Nothing is cut and nothing is guessed.
"""

import re
import unicodedata
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config.schema import DataConfig
from slipstream.data.prompts import (
    EMPTY,
    IN_EVALUATION,
    TOO_LONG_PROMPT,
    DropReport,
    Message,
    check_rendering,
    checked_messages,
    is_blank,
    prompt_identity,
    prompt_messages,
    render_messages,
    render_prompt,
    with_system_prompt,
)
from slipstream.data.source import Row, load_rows
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_RESPONSE = "no response"
TOO_LONG = "prompt and response longer than max_tokens"
NOT_SEPARABLE = "assistant text not separable in the rendered conversation"

Masked = tuple[list[int], list[bool]]


class RowDroppedError(Exception):
    """This row cannot be used, for the reason in the message."""


def build_sft_examples(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    *,
    exclude: Collection[str] = frozenset(),
) -> tuple[list[TrainingExample], DropReport]:
    """Examples to imitate, in the order of the source, and a report of the rows that are not among them.

    `loss_mask` is True on each assistant text and on the token that ends the turn: the template's, or EOS where the
    template has none or is not applied. An example's id is its row number. With `response_key` equal to `prompt_key`
    the column holds whole conversations; messages after the last assistant turn are ignored.

    Left out and counted: empty prompts, rows without response, rows longer than `max_tokens` or with a prompt longer
    than `max_prompt_tokens` (never cut), rows whose `prompt_identity` is in `exclude`, and conversations whose
    assistant texts cannot be told apart from the rest in the template's render.

    Raises DataError, ModelError and ConfigError as `build_prompts` does.
    """
    _check_keys(config)
    check_rendering(config, tokenizer)
    rows = load_rows(config)
    report = DropReport(total=len(rows))
    examples = []
    for number, row in enumerate(rows):
        try:
            tokens, mask = _masked_row(number, row, config, tokenizer, exclude=exclude)
            if mask.index(True) > config.max_prompt_tokens:
                raise RowDroppedError(f"{TOO_LONG_PROMPT} ({config.max_prompt_tokens})")
            if len(tokens) > max_tokens:
                raise RowDroppedError(f"{TOO_LONG} ({max_tokens})")
        except RowDroppedError as dropped:
            report.drop(number, str(dropped))
            continue
        examples.append(TrainingExample(str(number), np.asarray(tokens, dtype=np.int64), np.asarray(mask, dtype=bool)))
    if not examples:
        raise DataError(f"data.source: no row of {config.source!r} is left to use: {report}")
    return examples, report


def _check_keys(config: DataConfig) -> None:
    if config.response_key is None:
        raise ConfigError("data.response_key must name the column with the response to imitate")
    if config.response_key != config.prompt_key:
        return
    if not config.apply_chat_template:
        raise ConfigError("whole conversations (data.response_key = data.prompt_key) need data.apply_chat_template")
    if config.prompt_template != "{prompt}":
        raise ConfigError("data.prompt_template has no place in whole conversations (response_key = prompt_key)")


def _masked_row(
    number: int,
    row: Row,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    exclude: Collection[str],
) -> Masked:
    """Tokens and loss mask of one row, at least one entry of it True. Raises RowDroppedError with the reason."""
    require_usable_prompt(number, row, config, exclude)
    if config.response_key == config.prompt_key:
        messages = checked_messages(number, row[config.prompt_key], config.prompt_key)
        return _masked_messages(number, with_system_prompt(number, messages, config), tokenizer)
    return masked_answer(number, row, str(config.response_key), config=config, tokenizer=tokenizer)


def require_usable_prompt(number: int, row: Row, config: DataConfig, exclude: Collection[str]) -> None:
    """Raise RowDroppedError for a prompt that is empty or held out, DataError for one that is none."""
    prompt = row.get(config.prompt_key)
    if is_blank(prompt):
        raise RowDroppedError(EMPTY)
    if not isinstance(prompt, str):
        checked_messages(number, prompt, config.prompt_key)
    identity = prompt_identity(row, config.prompt_key)
    if not identity:
        raise RowDroppedError(EMPTY)
    if identity in exclude:
        raise RowDroppedError(IN_EVALUATION)


def masked_answer(
    number: int, row: Row, column: str, *, config: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> Masked:
    """The row's prompt with the answer in `column`, up to the token that ends it, and where that answer is.

    Raises RowDroppedError with the reason, DataError for an answer that is not text.
    """
    answer = row.get(column)
    if is_blank(answer):
        raise RowDroppedError(NO_RESPONSE)
    if not isinstance(answer, str):
        raise DataError(f"row {number}: expected text in {column!r}, found {type(answer).__name__}")
    if not config.apply_chat_template:
        return _masked_text(number, row, answer, config, tokenizer)
    # Only the given answer is learned: assistant turns inside the prompt are context.
    messages = [*prompt_messages(number, row, config), {"role": "assistant", "content": answer}]
    return _masked_messages(number, messages, tokenizer, only_last=True)


def _masked_text(
    number: int, row: Row, response: str, config: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> Masked:
    """Prompt as a rollout engine gets it, then the response, then EOS."""
    prompt_tokens, _ = render_prompt(number, row, config, tokenizer)
    response_tokens = list(tokenizer(response, add_special_tokens=False)["input_ids"])
    if response_tokens[-1] != tokenizer.eos_token_id:
        response_tokens.append(int(tokenizer.eos_token_id))
    return prompt_tokens + response_tokens, [False] * len(prompt_tokens) + [True] * len(response_tokens)


def _masked_messages(
    number: int, messages: list[Message], tokenizer: "PreTrainedTokenizerBase", *, only_last: bool = False
) -> Masked:
    """Tokens and mask of a conversation, from its final render. The sequence ends where its last turn ends."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or all(_is_silent(messages[turn]) for turn in turns):
        raise RowDroppedError(NO_RESPONSE)
    messages = messages[: turns[-1] + 1]
    text = render_messages(number, messages, tokenizer, add_generation_prompt=False)
    starts = _assistant_starts(number, messages, turns, text=text, tokenizer=tokenizer)
    if only_last:
        turns, starts = turns[-1:], starts[-1:]

    enders = _special_ids(tokenizer)
    tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    begins = [_token_boundary(text[:start], tokens, tokenizer) for start in starts]
    end_of_turn = next((token for token in tokens[begins[-1] :] if token in enders), None)
    if end_of_turn is None:
        if len(turns) > 1:  # nothing in the render says where the earlier turns end
            raise RowDroppedError(NOT_SEPARABLE)
        tokens = list(tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"])
        tokens.append(int(tokenizer.eos_token_id))
    mask = [False] * len(tokens)
    end = 0
    for turn, begin in zip(turns, begins, strict=True):
        last = next(place for place in range(begin, len(tokens)) if tokens[place] in enders)
        span = tokens[begin : last + 1]
        # An earlier turn closed by another token than the last one was not closed: what follows opens the next turn.
        if begin < max(end, 1) or span[-1] not in (end_of_turn, tokenizer.eos_token_id):
            raise RowDroppedError(NOT_SEPARABLE)
        spelled = str(tokenizer.decode(span, clean_up_tokenization_spaces=False))
        if _visible_text(messages[turn]) not in unicodedata.normalize("NFC", spelled):
            raise RowDroppedError(NOT_SEPARABLE)
        end = last + 1
        mask[begin:end] = [True] * len(span)
    return tokens[:end], mask[:end]


def _assistant_starts(
    number: int,
    messages: list[Message],
    turns: list[int],
    *,
    text: str,
    tokenizer: "PreTrainedTokenizerBase",
) -> list[int]:
    """Where in the final render `text` each assistant turn begins: right after what asks the model for it.

    Templates that mark their assistant texts ({% generation %}) say so themselves. For others, what precedes a turn
    is the render of the messages before it with the generation prompt; where that is not how the final render
    begins, the template has rewritten those messages and the row is refused.
    """
    template = tokenizer.get_chat_template()
    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        from transformers.utils.chat_template_utils import render_jinja_template

        special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
        rendered: Any = render_jinja_template(
            [messages], chat_template=template, return_assistant_tokens_mask=True, **special_tokens
        )
        starts = [int(start) for start, _ in rendered[1][0]]
    else:
        prefixes = [
            render_messages(number, messages[:turn], tokenizer, add_generation_prompt=True) if turn else ""
            for turn in turns
        ]
        starts = [len(prefix) for prefix in prefixes if prefix and text.startswith(prefix)]
    if len(starts) != len(turns):
        raise RowDroppedError(NOT_SEPARABLE)
    return starts


def _token_boundary(prefix: str, tokens: list[int], tokenizer: "PreTrainedTokenizerBase") -> int:
    """Number of tokens that `prefix`, the beginning of the text of `tokens`, is made of. Refuses the row where it
    would be tokenized differently alone: a token then straddles the boundary, and a rollout's prompt has others."""
    prefix_tokens = list(tokenizer(prefix, add_special_tokens=False)["input_ids"])
    if tokens[: len(prefix_tokens)] != prefix_tokens:
        raise RowDroppedError(NOT_SEPARABLE)
    return len(prefix_tokens)


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Control tokens: those no ordinary text contains. <think> and tool tags are added tokens, but not control."""
    special = {int(token) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(special | {int(token) for token in tokenizer.all_special_ids})


def _is_silent(message: Message) -> bool:
    return is_blank(message.get("content")) and not message.get("tool_calls")


def _visible_text(message: Message) -> str:
    """What every template must show of an assistant message: its content without the thinking before it."""
    content = unicodedata.normalize("NFC", str(message.get("content") or ""))
    return content.split("</think>")[-1].strip()
