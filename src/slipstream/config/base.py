"""The base of every configuration section: strict, frozen, no unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of configuration keys. Unknown keys and wrong types are errors; values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)
