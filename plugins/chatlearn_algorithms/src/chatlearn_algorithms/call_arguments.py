"""Arguments of the flow methods of this distribution."""

from __future__ import annotations

from pydantic import Field

from chatlearn_core.flow.arguments import ComputeArguments


class MismatchedArguments(ComputeArguments):
    """How to compute mismatched logprobs."""

    cache: bool = Field(False, description="Keep the results on disk, as other calls on frozen roles do.")


class TextLogprobsArguments(ComputeArguments):
    """Whose samples a teacher reads, and which."""

    student: str = Field(min_length=1, description="A trainer role with the tokenizer of the samples.")
    data_sources: list[str] | None = Field(
        None, min_length=1, description="Compute only samples of these data sources; the others have zeros."
    )
