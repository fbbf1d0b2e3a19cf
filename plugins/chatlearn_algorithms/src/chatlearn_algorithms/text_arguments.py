"""Arguments of the flow method ``trainer.text_logprobs``."""

from __future__ import annotations

from pydantic import Field

from chatlearn_core.flow.arguments import ComputeArguments


class TextLogprobsArguments(ComputeArguments):
    """Whose samples a teacher reads, and which."""

    student: str = Field(min_length=1, description="A trainer role with the tokenizer of the samples.")
    data_sources: list[str] | None = Field(
        None, min_length=1, description="Compute only samples of these data sources; the others have zeros."
    )
