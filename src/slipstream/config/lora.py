"""The keys of a LoRA adapter. Imports nothing heavy."""

from pydantic import Field

from slipstream.config.base import Section


class LoraConfig(Section):
    """A LoRA adapter that learns in place of the model's weights."""

    rank: int = Field(16, ge=1, description="Rows of A and columns of B, the two matrices beside a weight.")
    alpha: int = Field(32, ge=1, description="B A is multiplied with alpha / rank.")
    target_modules: list[str] | None = Field(
        None, min_length=1, description="Names of the modules that get one; null for all linear ones but the head."
    )
