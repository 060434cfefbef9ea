"""Which column of a source means what: as configured, or recognized by its name.

Stands between `data/source.py` and everything that reads rows. Known are the columns of this project, and those that
rows made for OpenRLHF (input, output), TRL (prompt, completion, messages, text) and verl (reward_model.ground_truth)
have. What is looked for depends on what is learned from a row, its layout. Nothing is guessed: a column that no name
tells is an error that lists those there are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from slipstream.config.data import AUTO, DataConfig
from slipstream.data.source import Row, load_rows
from slipstream.errors import DataError

PROMPTS = ("prompt", "messages", "input", "question")
RESPONSES = ("response", "completion", "output", "answer")
REFERENCE_ANSWERS = ("label", "reward_model.ground_truth", "answer")
CONVERSATION = "messages"
TEXT = "text"
SPLIT_PROMPT = "instruction"
"""Where there is such a column, `input` is only a part of the prompt: neither is taken for it."""

SPLIT_OFF_PROMPT = "the common beginning"
"""Where a prompt goes that was split off from the answers: no column of a source is called so."""


class Layout(StrEnum):
    """What a row is: a question, a response to imitate, two answers of which one is better, or one with a label, as a
    whole or for each of its steps."""

    PROMPTS = "prompts"
    RESPONSES = "responses"
    PAIRS = "pairs"
    LABELLED_ANSWERS = "labelled answers"
    LABELLED_STEPS = "labelled steps"


@dataclass(frozen=True)
class Table:
    """Rows, and in `config` the column of everything that they have, none of them `auto`.

    With `response_key` equal to `prompt_key` a column holds whole conversations. A `prompt_key` that is None means
    rows without one: responses that are texts to be learned from their first token on, or pairs of whole
    conversations. `holds_texts`: pairs of whole texts, prompt and answer in one, that no chat template goes around.
    """

    rows: list[Row]
    config: DataConfig
    columns: str = ""
    """What was taken from which column, in words."""
    holds_texts: bool = False


def load_table(config: DataConfig, layout: Layout, *, needs_label: bool = True) -> Table:
    """Load the rows of one source and name their columns. Raises DataError as `load_rows` and `name_columns` do."""
    return name_columns(load_rows(config), config, layout, needs_label=needs_label)


def name_columns(rows: list[Row], config: DataConfig, layout: Layout, *, needs_label: bool = True) -> Table:
    """Name the columns of rows by `config`, and those it leaves open by what is recognized.

    `needs_label`: rows with prompts must have a reference answer, unless `label_key` is null.

    Raises DataError if a configured column is in no row, or if none is recognized.
    """
    found = sorted({column for row in rows for column in row})
    naming = _Naming(config, found, rows)
    match layout:
        case Layout.PROMPTS:
            names = naming.prompts(needs_label=needs_label)
        case Layout.RESPONSES:
            names = naming.responses(RESPONSES)
        case Layout.PAIRS:
            names = naming.pairs()
        case Layout.LABELLED_ANSWERS:
            names = naming.responses(RESPONSES[:-1]) | {"label_key": naming.required("label_key", ("label",))}
        case Layout.LABELLED_STEPS:
            names = naming.labelled_steps()
    resolved = config.model_copy(update=names)
    holds_texts = (
        layout is Layout.PAIRS
        and resolved.prompt_key is None
        and any(isinstance(cell(row, resolved.chosen_key), str) for row in rows)
    )
    columns = ", ".join(f"{key.removesuffix('_key')} {column!r}" for key, column in names.items() if column)
    return Table(rows, resolved, f"columns: {columns}", holds_texts)


def cell(row: Mapping[str, Any], column: str | None) -> Any:
    """What a row has in a column, None if it has none. `a.b` is entry b of column a, unless a column is called so."""
    if column is None:
        return None
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


class _Naming:
    """Finds the columns of a set of rows."""

    def __init__(self, config: DataConfig, found: list[str], rows: list[Row]) -> None:
        self._config = config
        self._found = found
        self._rows = rows

    def prompts(self, *, needs_label: bool) -> dict[str, str | None]:
        label = self._config.label_key
        if label == AUTO:
            label = self.recognized(REFERENCE_ANSWERS)
        if label is None and needs_label and self._config.label_key is not None:
            raise self._unrecognized("label_key", REFERENCE_ANSWERS)
        return {
            "prompt_key": self.required("prompt_key", PROMPTS),
            "label_key": label and self.present("label_key", label),
        }

    def responses(self, candidates: tuple[str, ...]) -> dict[str, str | None]:
        prompt = self._config.prompt_key
        response: str | None = self._config.response_key
        if prompt is None:
            return {"prompt_key": None, "response_key": self.required("response_key", (TEXT,))}
        if response == AUTO:
            response = self.recognized(name for name in candidates if name != prompt)
            if response is None and prompt == AUTO:
                return self._alone(candidates)
            if response is None and self._holds_messages(prompt):
                response = prompt
        if response is None:
            raise self._unrecognized("response_key", candidates)
        if prompt == AUTO:
            prompt = self.recognized(name for name in PROMPTS if name != response)
            if prompt is None and response in PROMPTS:
                prompt = response
        if prompt is None:
            raise self._unrecognized("prompt_key", PROMPTS)
        return {
            "prompt_key": self.present("prompt_key", prompt),
            "response_key": self.present("response_key", response),
        }

    def _alone(self, candidates: tuple[str, ...]) -> dict[str, str | None]:
        """One column that holds everything: conversations, or texts."""
        if CONVERSATION in self._found:
            return {"prompt_key": CONVERSATION, "response_key": CONVERSATION}
        prompt = self.recognized(PROMPTS)
        if prompt is not None and self._holds_messages(prompt):
            return {"prompt_key": prompt, "response_key": prompt}
        if prompt is None and TEXT in self._found:
            return {"prompt_key": None, "response_key": TEXT}
        raise self._unrecognized("response_key", (*candidates, CONVERSATION, TEXT))

    def pairs(self) -> dict[str, str | None]:
        prompt = self._config.prompt_key
        if prompt == AUTO:
            prompt = self.recognized(PROMPTS)
        return {
            "prompt_key": prompt and self.present("prompt_key", prompt),
            "chosen_key": self.required("chosen_key", ("chosen",)),
            "rejected_key": self.required("rejected_key", ("rejected",)),
        }

    def labelled_steps(self) -> dict[str, str | None]:
        return {
            "prompt_key": self.required("prompt_key", PROMPTS),
            "steps_key": self.required("steps_key", ("completions",)),
            "step_labels_key": self.required("step_labels_key", ("labels",)),
        }

    def required(self, key: str, candidates: tuple[str, ...]) -> str:
        """The configured column, or the first of `candidates` that there is."""
        configured = getattr(self._config, key)
        if configured == AUTO:
            configured = self.recognized(candidates)
        if configured is None:
            raise self._unrecognized(key, candidates)
        return self.present(key, configured)

    def recognized(self, candidates: Iterable[str]) -> str | None:
        """The first of `candidates` that there is."""
        for name in candidates:
            if self._is_there(name) and not (name == "input" and SPLIT_PROMPT in self._found):
                return name
        return None

    def present(self, key: str, column: str) -> str:
        """A configured column, which must be there."""
        if self._is_there(column):
            return column
        nearest = get_close_matches(column, self._found, n=1)
        suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise DataError(
            f"data.{key}: no column {column!r} in {self._config.source!r}{suggestion} "
            f"({self._columns()}); set data.{key} to one of them{_alternative(key)}"
        )

    def _unrecognized(self, key: str, candidates: Iterable[str]) -> DataError:
        names = list(candidates)
        nearest = [column for name in names for column in get_close_matches(name, self._found, n=1)]
        if key == "prompt_key" and SPLIT_PROMPT in self._found:
            return DataError(
                f"data.prompt_key: {self._config.source!r} has a column {SPLIT_PROMPT!r} ({self._columns()}): where "
                "the prompt is divided over several columns, write it into one and name that"
            )
        suggestion = f"; is it {nearest[0]!r}?" if nearest else ""
        return DataError(
            f"data.{key}: no column of {self._config.source!r} is known to hold this{suggestion or '.'} Looked for "
            f"{', '.join(names)} ({self._columns()}); set data.{key} to one of them{_alternative(key)}"
        )

    def _columns(self) -> str:
        return f"columns found: {', '.join(self._found) or 'none'}"

    def _is_there(self, column: str) -> bool:
        if column in self._found:
            return True
        return "." in column and any(cell(row, column) is not None for row in self._rows)

    def _holds_messages(self, column: str) -> bool:
        return any(isinstance(cell(row, column), list) for row in self._rows)


def _alternative(key: str) -> str:
    return ", or to null if rows have no reference answer" if key == "label_key" else ""
