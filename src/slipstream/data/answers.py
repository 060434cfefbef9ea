"""Answers as they lie in a row, brought to one form: a prompt, and what the assistant said to it.

A pair can be two answers beside their prompt, or two whole conversations whose beginnings are the same; an answer can
be text, one message, or several. Here a prompt that lies in the answers is split off, so that everything after this
sees a prompt and answers that begin with the assistant's turn.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.config.data import DataConfig
from slipstream.data.columns import SPLIT_OFF_PROMPT, Layout, Table, cell, load_table
from slipstream.data.prompts import EMPTY, Message, RowDroppedError, checked_messages, is_blank, prompt_identity
from slipstream.data.source import Row
from slipstream.errors import DataError

NO_COMMON_PROMPT = "the two conversations differ before the assistant's answer"
NO_ANSWER = "no answer of the assistant at the end"
ANSWER = "the last message"


def split_table(table: Table, layout: Layout) -> Table:
    """The table whose `config` says where `split_row` leaves prompts and answers. Its rows are still as they lay."""
    config = table.config
    if layout is Layout.PAIRS:
        update: dict[str, Any] = {"prompt_key": config.prompt_key or SPLIT_OFF_PROMPT}
        if table.holds_texts:
            update["apply_chat_template"] = False
        config = config.model_copy(update=update)
    elif layout is Layout.LABELLED_ANSWERS and config.prompt_key == config.response_key:
        config = config.model_copy(update={"response_key": ANSWER})
    return replace(table, config=config)


def split_row(number: int, row: Row, config: DataConfig, layout: Layout) -> Row:
    """A row with prompt and answers in columns of their own, by the `config` of `split_table`.

    Raises RowDroppedError where there is no prompt that both answers have, DataError for what is no answer at all.
    """
    if layout is Layout.PAIRS:
        return _split_pair(number, row, config)
    if layout is Layout.LABELLED_ANSWERS and config.response_key == ANSWER:
        return _split_conversation(number, row, str(config.prompt_key))
    return row


def evaluation_identities(config: DataConfig, layout: Layout, *, needs_label: bool = True) -> frozenset[str]:
    """The identities of all rows of a held-out section, to be left out of training (see `prompt_identity`)."""
    identities = set()
    for part in config.parts.values():
        table = split_table(load_table(part, layout, needs_label=needs_label), layout)
        column = table.config.prompt_key or table.config.response_key
        for number, row in enumerate(table.rows):
            try:
                row = split_row(number, row, table.config, layout)
            except RowDroppedError:
                continue
            if isinstance(cell(row, column), list):
                checked_messages(number, cell(row, column), column)
            identities.add(prompt_identity(row, column))
    return frozenset(identities)


def _split_pair(number: int, row: Row, config: DataConfig) -> Row:
    prompt_key = str(config.prompt_key)
    chosen, rejected = (_unwrapped(cell(row, column)) for column in (config.chosen_key, config.rejected_key))
    if is_blank(chosen) or is_blank(rejected):
        return row  # an empty answer is counted where answers are rendered
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt_key != SPLIT_OFF_PROMPT:
            return row  # whatever the prompt is: an empty one is counted as such
        start = _split_place(chosen, rejected)
        prompt: str | list[Message] = chosen[:start]
        if is_blank(prompt):
            raise RowDroppedError(EMPTY)
        return row | {prompt_key: prompt, config.chosen_key: chosen[start:], config.rejected_key: rejected[start:]}
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise DataError(
            f"row {number}: expected text, or a list of chat messages, in both {config.chosen_key!r} and "
            f"{config.rejected_key!r}, found {type(chosen).__name__} and {type(rejected).__name__}"
        )
    conversations = [
        checked_messages(number, answer, column)
        for answer, column in ((chosen, config.chosen_key), (rejected, config.rejected_key))
    ]
    if all(messages[0]["role"] == "assistant" for messages in conversations):
        return row | {config.chosen_key: conversations[0], config.rejected_key: conversations[1]}
    start = _common_messages(*conversations)
    if not start or any(messages[start]["role"] != "assistant" for messages in conversations):
        raise RowDroppedError(NO_COMMON_PROMPT)
    return row | {
        prompt_key: conversations[0][:start],
        config.chosen_key: conversations[0][start:],
        config.rejected_key: conversations[1][start:],
    }


def _unwrapped(answer: object) -> object:
    """A single message counts as a list of one."""
    return [answer] if isinstance(answer, dict) else answer


def _split_place(first: str, second: str) -> int:
    """Where two texts with one prompt are divided: the space before the first word in which they differ.

    At a space, because a tokenizer that sees the prompt alone then finds the tokens that it finds in the whole text. Of
    two equal texts the last word is the answer. Words that both answers begin with stay with the prompt: they have the
    same tokens after the same context, so no comparison of the two changes.
    """
    pairs = enumerate(zip(first.rstrip(), second.rstrip(), strict=False))
    common = next(
        (place for place, (one, other) in pairs if one != other), min(len(first.rstrip()), len(second.rstrip()))
    )
    before = first[:common].rstrip() if common < len(first) and first[common].isspace() else first[:common]
    place = max((index for index, character in enumerate(before) if character.isspace()), default=0)
    while place and before[place - 1].isspace():
        place -= 1
    return place


def _common_messages(first: Sequence[Message], second: Sequence[Message]) -> int:
    """How many messages two conversations begin with in common; never all of one, so that an answer is left."""
    count = 0
    for one, other in zip(first[:-1], second[:-1], strict=False):
        if one != other:
            break
        count += 1
    return count


def _split_conversation(number: int, row: Row, column: str) -> Row:
    value = cell(row, column)
    if is_blank(value):
        raise RowDroppedError(EMPTY)
    *prompt, last = checked_messages(number, value, column)
    if last["role"] != "assistant":
        raise RowDroppedError(NO_ANSWER)
    return row | {column: prompt, ANSWER: last.get("content")}
