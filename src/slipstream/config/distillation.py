"""The keys of a teacher whose whole distribution is learned from in supervised fine-tuning."""

from typing import Literal

from pydantic import Field

from slipstream.config.base import PathText, Section


class TeacherConfig(Section):
    """A second model with the same tokens, which the student is drawn to at every token of the responses."""

    path: PathText = Field(
        description="Hub name or local folder of the teacher; its tokenizer must have the same tokens."
    )
    divergence: Literal["forward", "reverse"] = Field(
        "forward", description="forward: KL(teacher || student), covers the teacher; reverse: KL(student || teacher)."
    )
    temperature: float = Field(
        1.0, gt=0, le=100, description="Divides both models' logits; the divergence is multiplied by its square."
    )
    coefficient: float = Field(
        1.0, gt=0, le=1, description="Weight of the divergence; the cross-entropy on the data has what is left of 1."
    )
