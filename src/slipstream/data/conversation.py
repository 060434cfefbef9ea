"""Conversations to imitate become training examples whose loss covers the assistant's text and nothing else.

Stands between `data/columns.py` and the SFT workflow. A row is a prompt and a response, or a list of chat messages
whose assistant turns are learned, or a text that is learned whole.

The loss mask comes from the final render. Chat templates rewrite earlier turns (Qwen3 drops their thinking), so a
span measured on a partial render can lie elsewhere in the final one; and a text tokenized in pieces can differ from
the same text tokenized whole. Hence: render the whole conversation once, find where each assistant text begins in
that render, tokenize the whole once, and refuse a row (counted, with its number) where a boundary does not fall
between two tokens. Nothing is cut and nothing is guessed.
"""

import re
import unicodedata
from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.data.columns import Layout, cell, load_table
from slipstream.data.prompts import (
    TOO_LONG_PROMPT,
    DropReport,
    Message,
    RowDroppedError,
    check_rendering,
    checked_messages,
    is_blank,
    prompt_messages,
    read_rows,
    render_messages,
    render_prompt,
    require_encodable,
    require_usable_prompt,
    with_system_prompt,
)
from slipstream.data.source import Row
from slipstream.data.tokenizer import control_tokens, tokenize_plain
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_RESPONSE = "no response"
TOO_LONG = "prompt and response longer than max_tokens"
NOT_SEPARABLE = "assistant text not separable in the rendered conversation"

Masked = tuple[list[int], list[bool]]


def build_sft_examples(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    *,
    exclude: Collection[str] = frozenset(),
    only_last_turn: bool = False,
    id_prefix: str = "",
) -> tuple[list[TrainingExample], DropReport]:
    """Examples to imitate of one source, in its order, and a report of the rows that are not among them.

    `loss_mask` is True on each assistant text and on the token that ends the turn: the template's, or EOS where the
    template has none or is not applied. With `response_key` equal to `prompt_key` the column holds whole conversations;
    messages after the last assistant turn are ignored. `only_last_turn`: earlier ones are context. An example's id is
    `id_prefix` and its row number.

    With `prompt_key` None the rows are texts, learned from the first token on to an EOS behind the last. A text longer
    than `max_tokens` becomes several examples, each of which begins with the last token of the one before, so that
    every token is predicted once.

    Left out and counted: empty prompts, rows without response, rows longer than `max_tokens` or with a prompt longer
    than `max_prompt_tokens` (never cut), rows whose `prompt_identity` is in `exclude`, and conversations whose
    assistant texts cannot be told apart from the rest in the template's render.

    Raises DataError, ModelError and ConfigError as `build_prompts` does.
    """
    table = load_table(config, Layout.RESPONSES)
    config = table.config
    if config.prompt_key is None:
        _check_texts(config)
    else:
        _check_conversations(config)
        check_rendering(config, tokenizer)

    def read(number: int, row: Row) -> list[TrainingExample]:
        require_usable_prompt(number, row, config, exclude)
        if config.prompt_key is None:
            return _text_examples(number, row, config, tokenizer, max_tokens, id_prefix=id_prefix)
        tokens, mask = _masked_row(number, row, config, tokenizer, only_last_turn=only_last_turn)
        require_length(tokens, mask, max_tokens, config=config)
        return [_example(f"{id_prefix}{number}", tokens, mask)]

    examples, report = read_rows(table, read)
    return list(chain.from_iterable(examples)), report


def _check_conversations(config: DataConfig) -> None:
    if config.response_key != config.prompt_key:
        return
    if not config.apply_chat_template:
        raise ConfigError("whole conversations (data.response_key = data.prompt_key) need data.apply_chat_template")
    if config.prompt_template != "{prompt}":
        raise ConfigError("data.prompt_template has no place in whole conversations (response_key = prompt_key)")


def _check_texts(config: DataConfig) -> None:
    for key, is_set in (
        ("prompt_template", config.prompt_template != "{prompt}"),
        ("system_prompt", config.system_prompt is not None),
    ):
        if is_set:
            raise ConfigError(f"data.{key} has no place around texts that are learned whole (data.prompt_key null)")


def _example(example_id: str, tokens: list[int], mask: list[bool]) -> TrainingExample:
    return TrainingExample(example_id, np.asarray(tokens, dtype=np.int64), np.asarray(mask, dtype=bool))


def _text_examples(
    number: int,
    row: Row,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    *,
    id_prefix: str,
) -> list[TrainingExample]:
    """A text and its EOS in pieces of at most `max_tokens`. Nothing predicts the first token of a piece."""
    text = _text(number, row, config.response_key)
    tokens, _ = tokenize_plain(tokenizer, text)
    if tokens[-1] != tokenizer.eos_token_id:
        tokens = [*tokens, int(tokenizer.eos_token_id)]
    pieces = [tokens[start : start + max_tokens] for start in range(0, max(len(tokens) - 1, 1), max_tokens - 1)]
    names = [f"{id_prefix}{number}"] if len(pieces) == 1 else [f"{id_prefix}{number}.{k}" for k in range(len(pieces))]
    return [
        _example(name, piece, [False] + [True] * (len(piece) - 1)) for name, piece in zip(names, pieces, strict=True)
    ]


def _text(number: int, row: Row, column: str) -> str:
    """A cell that must hold text; RowDroppedError where it holds nothing."""
    text = cell(row, column)
    if is_blank(text):
        raise RowDroppedError(NO_RESPONSE)
    if not isinstance(text, str):
        raise DataError(f"row {number}: expected text in {column!r}, found {type(text).__name__}")
    require_encodable(number, text, column)
    return text


def _masked_row(
    number: int, row: Row, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", *, only_last_turn: bool
) -> Masked:
    """Tokens and loss mask of one row, at least one entry of it True. Raises RowDroppedError with the reason."""
    if config.response_key == config.prompt_key:
        messages = checked_messages(number, cell(row, config.prompt_key), config.response_key)
        messages = with_system_prompt(number, messages, config)
        return _masked_messages(number, messages, tokenizer, only_last_turn=only_last_turn)
    return masked_answer(
        number, row, config.response_key, config=config, tokenizer=tokenizer, only_last_turn=only_last_turn
    )


def require_length(
    tokens: list[int], mask: list[bool], max_tokens: int, *, config: DataConfig, reason: str = TOO_LONG
) -> None:
    """Raise RowDroppedError where the prompt, which ends where the mask begins, or the whole (`reason`) is too long."""
    if mask.index(True) > config.max_prompt_tokens:
        raise RowDroppedError(f"{TOO_LONG_PROMPT} ({config.max_prompt_tokens})")
    if len(tokens) > max_tokens:
        raise RowDroppedError(f"{reason} ({max_tokens})")


def masked_answer(
    number: int,
    row: Row,
    column: str,
    *,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    only_last_turn: bool = False,
) -> Masked:
    """The row's prompt with the answer in `column`, up to the token that ends it, and where that answer is.

    An answer is text, or a list of messages that go on after the prompt: of those the assistant's are the answer, or
    only the last of them. Raises RowDroppedError with the reason, DataError for an answer that is neither.
    """
    answer = cell(row, column)
    if is_blank(answer):
        raise RowDroppedError(NO_RESPONSE)
    if isinstance(answer, list):
        if not config.apply_chat_template:
            raise DataError(f"row {number}: {column!r} holds chat messages, which need data.apply_chat_template: true")
        turns = checked_messages(number, answer, column)
    else:
        turns = [{"role": "assistant", "content": _text(number, row, column)}]
    if not config.apply_chat_template:
        return _masked_text(number, row, str(answer), config, tokenizer)
    # Only the given answer is learned: assistant turns inside the prompt are context.
    prompt = prompt_messages(number, row, config)
    return _masked_messages(
        number, [*prompt, *turns], tokenizer, first_learned=len(prompt), only_last_turn=only_last_turn
    )


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
    number: int,
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    first_learned: int = 0,
    only_last_turn: bool = False,
) -> Masked:
    """Tokens and mask of a conversation, from its final render. The sequence ends where its last turn ends.

    Learned are the assistant's messages from number `first_learned` on, or only the last of them.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    learned = [turn for turn in turns if turn >= first_learned][-1 if only_last_turn else 0 :]
    if not learned or all(_is_silent(messages[turn]) for turn in learned):
        raise RowDroppedError(NO_RESPONSE)
    messages = messages[: turns[-1] + 1]
    text = render_messages(number, messages, tokenizer, add_generation_prompt=False)
    starts = _assistant_starts(number, messages, learned, text=text, tokenizer=tokenizer)

    enders = control_tokens(tokenizer)
    tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    begins = [_token_boundary(text[:start], tokens, tokenizer) for start in starts]
    end_of_turn = next((token for token in tokens[begins[-1] :] if token in enders), None)
    if end_of_turn is None:
        if len(learned) > 1:  # nothing in the render says where the earlier turns end
            raise RowDroppedError(NOT_SEPARABLE)
        tokens = list(tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"])
        tokens.append(int(tokenizer.eos_token_id))
    mask = [False] * len(tokens)
    end = 0
    for turn, begin in zip(learned, begins, strict=True):
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
    learned: list[int],
    *,
    text: str,
    tokenizer: "PreTrainedTokenizerBase",
) -> list[int]:
    """Where in the final render `text` each learned turn begins: right after what asks the model for it.

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
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        marked = [int(start) for start, _ in rendered[1][0]]
        starts = [marked[turns.index(turn)] for turn in learned] if len(marked) == len(turns) else []
    else:
        prefixes = [
            render_messages(number, messages[:turn], tokenizer, add_generation_prompt=True) if turn else ""
            for turn in learned
        ]
        starts = [len(prefix) for prefix in prefixes if prefix and text.startswith(prefix)]
    if len(starts) != len(learned):
        raise RowDroppedError(NOT_SEPARABLE)
    return starts


def _token_boundary(prefix: str, tokens: list[int], tokenizer: "PreTrainedTokenizerBase") -> int:
    """Number of tokens that `prefix`, the beginning of the text of `tokens`, is made of. Refuses the row where it
    would be tokenized differently alone: a token then straddles the boundary, and a rollout's prompt has others."""
    prefix_tokens = list(tokenizer(prefix, add_special_tokens=False)["input_ids"])
    if tokens[: len(prefix_tokens)] != prefix_tokens:
        raise RowDroppedError(NOT_SEPARABLE)
    return len(prefix_tokens)


def _is_silent(message: Message) -> bool:
    return is_blank(message.get("content")) and not message.get("tool_calls")


def _visible_text(message: Message) -> str:
    """What every template must show of an assistant message: its content without the thinking before it."""
    content = unicodedata.normalize("NFC", str(message.get("content") or ""))
    return content.split("</think>")[-1].strip()
