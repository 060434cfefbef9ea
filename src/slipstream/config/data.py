"""The keys of a data section: where rows come from and which of their columns mean what.

A section means the same in every workflow that has it; which columns are looked for depends on what the workflow
learns from (`data/columns.py`).
"""

import re
from typing import Any, Self

from pydantic import Field, model_validator

from slipstream.config.base import PathText, Section

AUTO = "auto"
"""A column that is recognized by its name."""

REASONING_GYM_PREFIX = "reasoning_gym:"

SOURCES = "Hub dataset name, local file or folder (jsonl, json, csv, parquet), or 'reasoning_gym:TASK'."


class SourceSection(Section):
    """One source of rows."""

    source: PathText = Field("", description=f"{SOURCES} Required, unless there is a mix.")
    split: str = Field("train", description="Split of a hub dataset or folder.")
    subset: str | None = Field(None, description="Configuration name of a hub dataset, such as 'main' of gsm8k.")
    prompt_key: str | None = Field(
        AUTO, description="Column with the prompt: a string, or a list of chat messages; null if rows have none."
    )
    label_key: str | None = Field(
        AUTO, description="Column with the reference answer (kto: true or false); null if rows have none."
    )
    response_key: str = Field(AUTO, description="Column with the response to learn from (sft, kto).")
    chosen_key: str = Field(AUTO, description="Column with the better answer (reward-model, preference).")
    rejected_key: str = Field(AUTO, description="Column with the worse answer (reward-model, preference).")
    steps_key: str = Field(AUTO, description="Column with the steps of an answer, a list of texts (reward-model).")
    step_labels_key: str = Field(AUTO, description="Column with their labels: true or false, or 0 to 1 (reward-model).")
    prompt_template: str = Field("{prompt}", description="Text around the prompt; '{prompt}' is replaced by it.")
    rows: int | None = Field(None, ge=1, description="Use at most this many rows; size of a reasoning_gym task.")
    task_seed: int = Field(0, ge=0, description="Seed of a reasoning_gym task's rows.")
    task_options: dict[str, Any] = Field(default_factory=dict, description="Options of a reasoning_gym task.")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if "{prompt}" not in self.prompt_template:
            raise ValueError("prompt_template must contain '{prompt}'")
        if self.source.startswith(REASONING_GYM_PREFIX) and self.rows is None:
            raise ValueError("a reasoning_gym source needs rows, the number of questions to generate")
        if self.task_options and not self.source.startswith(REASONING_GYM_PREFIX):
            raise ValueError("task_options only apply to a source 'reasoning_gym:TASK'")
        return self


class MixedSource(SourceSection):
    """One of several sources that are mixed."""

    weight: float = Field(1.0, gt=0, description="Share of the rows drawn from this source, relative to the others.")

    @model_validator(mode="after")
    def _check_mixed(self) -> Self:
        if not self.source:
            raise ValueError(f"source is missing; expected text ({SOURCES})")
        return self


class DataConfig(SourceSection):
    """Where rows come from and which of their columns mean what."""

    mix: dict[str, MixedSource] = Field(
        default_factory=dict, description="Several sources by name, in place of source, drawn from by their weights."
    )
    system_prompt: str | None = Field(None, description="System message put before every prompt.")
    apply_chat_template: bool = Field(True, description="Render prompts with the tokenizer's chat template.")
    max_prompt_tokens: int = Field(512, ge=1, description="Longer prompts are dropped and counted, never cut.")
    shuffle: bool = Field(True, description="Draw rows in a seeded random order, a new one each epoch.")

    @property
    def parts(self) -> "dict[str, DataConfig]":
        """The sources that are mixed, each as a section of its own, by name; this section alone, named '', if none."""
        if not self.mix:
            return {"": self}
        return {
            name: self.model_copy(update={"mix": {}, **{key: getattr(part, key) for key in SourceSection.model_fields}})
            for name, part in self.mix.items()
        }

    @property
    def weights(self) -> dict[str, float]:
        """The weights of `parts`."""
        return {name: part.weight for name, part in self.mix.items()} or {"": 1.0}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.mix:
            if not self.source:
                raise ValueError(f"source is missing; expected text ({SOURCES}), or several sources in mix")
            return self
        for name in self.mix:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(
                    f"mix must name its sources with letters, digits, '-' and '_' (names become part of ids), found "
                    f"{name!r}"
                )
        for key, field in SourceSection.model_fields.items():
            if getattr(self, key) != field.get_default(call_default_factory=True):
                raise ValueError(f"{key} belongs to one source: with mix, set mix.NAME.{key}")
        return self
