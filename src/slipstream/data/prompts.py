"""Rows become prompts: rendered once, tokenized once, and everything that is left out is counted.

Stands between `data/source.py` and the cursor. The tokens made here are the ones the engine sees and the learner
trains on; nothing tokenizes the text again. The pieces that conversations need as well (checking messages, putting
the template and the system prompt around them, rendering) are here too, and so is the walk over the rows of a source.
"""

import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.data.columns import Layout, Table, cell, load_table
from slipstream.data.source import Row
from slipstream.data.tokenizer import tokenize_plain
from slipstream.data.trajectory import Prompt
from slipstream.data.turn import Turn
from slipstream.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Item = TypeVar("Item")

EMPTY = "empty prompt"
NO_USER = "no message whose role is 'user'"
TOO_LONG_PROMPT = "prompt longer than data.max_prompt_tokens"
IN_EVALUATION = "also an evaluation prompt"
MISSING_LABEL = "no label"
SHOWN_ROWS = 5


class RowDroppedError(Exception):
    """This row cannot be used, for the reason in the message."""


@dataclass
class DropReport:
    """Which rows were left out, and why. `dropped` maps a reason to the numbers of its rows in the source.

    `columns` says in words what was read from which column.
    """

    total: int
    columns: str = ""
    dropped: dict[str, list[int]] = field(default_factory=dict)

    def drop(self, row: int, reason: str) -> None:
        """Count a row as left out."""
        self.dropped.setdefault(reason, []).append(row)

    @property
    def counts(self) -> dict[str, int]:
        """Rows left out, by reason."""
        return {reason: len(rows) for reason, rows in self.dropped.items()}

    @property
    def kept(self) -> int:
        """Rows that are used."""
        return self.total - sum(self.counts.values())

    def __str__(self) -> str:
        """As in "98 of 100 rows kept; dropped: 2 empty prompt (rows 3, 17); columns: prompt 'question'"."""
        text = f"{self.kept} of {self.total} rows kept"
        reasons = []
        for reason, rows in self.dropped.items():
            shown = ", ".join(str(row) for row in rows[:SHOWN_ROWS]) + (", ..." if len(rows) > SHOWN_ROWS else "")
            reasons.append(f"{len(rows)} {reason} ({'row' if len(rows) == 1 else 'rows'} {shown})")
        dropped = f"; dropped: {'; '.join(reasons)}" if reasons else ""
        return text + dropped + (f"; {self.columns}" if self.columns else "")


def build_prompts(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    exclude: Collection[str] = frozenset(),
    needs_label: bool = True,
) -> tuple[list[Prompt], DropReport]:
    """The prompts of one source, in its order, and a report of the rows that are not among them.

    Left out and counted: empty prompts, prompts of more than `max_prompt_tokens` (never cut), rows without a label
    where there is a column of them, and rows whose `prompt_identity` is in `exclude`. `needs_label`: there must be such
    a column, unless `label_key` is null.

    Raises DataError if a row cannot be read as a prompt or no row is left, ModelError if a chat template is needed
    and the tokenizer has none, ConfigError if the keys of `config` contradict each other.
    """
    check_rendering(config, tokenizer)
    table = load_table(config, Layout.PROMPTS, needs_label=needs_label)
    config = table.config

    def read(number: int, row: Row) -> Prompt:
        require_usable_prompt(number, row, config, exclude)
        label = cell(row, config.label_key)
        if config.label_key is not None and is_blank(label):
            raise RowDroppedError(MISSING_LABEL)
        tokens, text = render_prompt(number, row, config, tokenizer)
        if len(tokens) > config.max_prompt_tokens:
            raise RowDroppedError(f"{TOO_LONG_PROMPT} ({config.max_prompt_tokens})")
        messages = _turns(number, row, config)
        given = cell(row, config.prompt_key)
        return Prompt(number, np.asarray(tokens, dtype=np.int64), text, label, row, messages, given)

    return read_rows(table, read)


def read_rows(table: Table, read: Callable[[int, Row], Item]) -> tuple[list[Item], DropReport]:
    """What `read` makes of the number and the cells of each row, and a report of the rows that it drops.

    `read` drops a row by a RowDroppedError. Raises DataError if no row is left, and what else `read` raises.
    """
    report = DropReport(total=len(table.rows), columns=table.columns)
    items = []
    for number, row in enumerate(table.rows):
        try:
            items.append(read(number, row))
        except RowDroppedError as dropped:
            report.drop(number, str(dropped))
    require_rows(items, table.config, report)
    return items, report


def require_rows(items: Sequence[object], config: DataConfig, report: DropReport) -> None:
    """Raise DataError, with the reasons, if no row of a source is left."""
    if not items:
        raise DataError(f"data.source: no row of {config.source!r} is left to use: {report}")


def require_usable_prompt(number: int, row: Row, config: DataConfig, exclude: Collection[str]) -> None:
    """Raise RowDroppedError for a prompt that is empty or held out, DataError for one that is none.

    What is learned without a prompt is its own.
    """
    column = config.prompt_key or config.response_key
    prompt = cell(row, column)
    if is_blank(prompt):
        raise RowDroppedError(EMPTY)
    if not isinstance(prompt, str):
        checked_messages(number, prompt, column)
    identity = prompt_identity(row, column)
    if not identity:
        raise RowDroppedError(_without_question(prompt))
    if identity in exclude:
        raise RowDroppedError(IN_EVALUATION)


def prompt_identity(row: Mapping[str, Any], prompt_key: str | None) -> str:
    """What makes two rows the same question: their users' text, whatever the spacing, the columns and the template.

    Training rows whose identity is that of an evaluation row are left out (`evaluation_identities` in answers.py).
    """
    value = cell(row, prompt_key)
    if isinstance(value, list):
        value = " ".join(str(message["content"]) for message in value if message["role"] == "user")
    return " ".join(unicodedata.normalize("NFC", str(value or "")).split())


def _without_question(prompt: object) -> str:
    """Why a prompt without a text of a user is left out."""
    has_user = not isinstance(prompt, list) or any(message["role"] == "user" for message in prompt)
    return EMPTY if has_user else NO_USER


def check_rendering(config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ModelError or ConfigError if prompts cannot be rendered the way `config` says."""
    if config.apply_chat_template and tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'!r} has no chat template; use an instruct model, "
            "or set data.apply_chat_template to false to give the model the bare text of data.prompt_template"
        )
    if config.system_prompt is not None and not config.apply_chat_template:
        raise ConfigError(
            "data.system_prompt needs data.apply_chat_template: true; without a chat template write it into "
            "data.prompt_template"
        )


def render_prompt(
    number: int, row: Row, config: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], str]:
    """Tokens and text of one row's prompt, ready for the model to go on from. `number` is named in errors."""
    messages = prompt_messages(number, row, config)
    if not config.apply_chat_template:
        if isinstance(cell(row, config.prompt_key), list):
            raise DataError(
                f"row {number}: {config.prompt_key!r} holds chat messages, which need data.apply_chat_template: true"
            )
        return tokenize_plain(tokenizer, messages[-1]["content"])
    if messages[-1]["role"] == "assistant":
        raise DataError(f"row {number}: the messages in {config.prompt_key!r} end with the assistant's, not a prompt")
    text = render_messages(number, messages, tokenizer, add_generation_prompt=True)
    # The template has written all special tokens there shall be, BOS among them: the tokenizer must not add its own.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]), text


def prompt_messages(number: int, row: Row, config: DataConfig) -> list[Message]:
    """The prompt column as chat messages, with `prompt_template` around the last user text and the system prompt."""
    value, column = cell(row, config.prompt_key), str(config.prompt_key)
    if isinstance(value, str):
        messages: list[Message] = [{"role": "user", "content": value}]
    else:
        messages = checked_messages(number, value, column)
    require_encodable(number, messages[-1].get("content") or "", column)
    last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last_user is not None:
        content = config.prompt_template.replace("{prompt}", messages[last_user]["content"])
        messages[last_user] = {**messages[last_user], "content": content}
    return with_system_prompt(number, messages, config)


def require_encodable(number: int, text: str, column: str) -> None:
    """Raise DataError for text that no tokenizer takes: half of a surrogate pair, as a cut-off escape leaves it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"row {number}: {column!r} holds half a character ({text[error.start]!a} at position {error.start}); "
            "mend or remove the row"
        ) from error


def with_system_prompt(number: int, messages: list[Message], config: DataConfig) -> list[Message]:
    """`messages` after the configured system prompt. Raises DataError if the row brings one of its own."""
    if config.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(f"row {number} has a system message of its own; set data.system_prompt to null to use it")
    return [{"role": "system", "content": config.system_prompt}, *messages]


def checked_messages(number: int, value: object, column: str) -> list[Message]:
    """A copy of a column's chat messages. Raises DataError if it is not a list of {role, content}."""
    if not isinstance(value, list):
        raise DataError(
            f"row {number}: expected text or a list of chat messages in {column!r}, found {type(value).__name__}"
        )
    for position, message in enumerate(value):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not (isinstance(message.get("content"), str) or _is_tool_call(message))
        ):
            raise DataError(
                f"row {number}: message {position} of {column!r} needs 'role' and 'content' as text, found "
                f"{_kinds(message)}"
            )
        require_encodable(number, message.get("content") or "", column)
    return [dict(message) for message in value]


def _kinds(message: object) -> str:
    """What there is in place of a message: its entries, and what kind of thing each of them is."""
    if not isinstance(message, dict):
        return type(message).__name__
    return ", ".join(f"{name} ({type(entry).__name__})" for name, entry in sorted(message.items())) or "nothing"


def _is_tool_call(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def render_messages(
    number: int, messages: list[Message], tokenizer: "PreTrainedTokenizerBase", *, add_generation_prompt: bool
) -> str:
    """Text of the messages by the tokenizer's chat template. Raises DataError if the template refuses them."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError) as error:
        raise DataError(f"row {number}: the tokenizer's chat template refuses the messages: {error}") from error
    return str(text)


def is_blank(value: object) -> bool:
    """Whether a cell holds nothing: null, NaN, no items, or white space only."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return value != value
    return value is None or (isinstance(value, (list, dict)) and not value)


def _turns(number: int, row: Row, config: DataConfig) -> tuple[Turn, ...]:
    """The messages that a row's prompt consists of, as they were rendered; none where it is one text."""
    if not isinstance(cell(row, config.prompt_key), list):
        return ()
    return tuple(Turn(each["role"], each.get("content") or "") for each in prompt_messages(number, row, config))
