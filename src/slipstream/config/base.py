"""The base of every configuration section: strict, frozen, no unknown keys; and the type of keys that hold a path."""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _expanded(path: str | None) -> str | None:
    return None if path is None else os.path.expanduser(path)


PathText = Annotated[str, AfterValidator(_expanded)]
"""A path, or a name where a hub or a list of tasks knows it. `~` is the home folder, as a shell would have it."""

OptionalPathText = Annotated[str | None, AfterValidator(_expanded)]
"""The same, or null."""


class Section(BaseModel):
    """A group of configuration keys. Unknown keys and wrong types are errors; values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)
