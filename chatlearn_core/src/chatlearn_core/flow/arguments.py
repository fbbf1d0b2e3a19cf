"""Arguments that calls of flows take besides samples, as pydantic models; imports pydantic only."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class NoArguments(BaseModel):
    """A call that takes only samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SamplingArguments(NoArguments):
    """Sampling parameters; omitted ones come from the run's ``sampling`` section."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, description="0 keeps the whole vocabulary.")
    stop: list[Annotated[str, Field(min_length=1)]] | None = None


class GenerateArguments(SamplingArguments):
    """Sampling parameters and the number of completions."""

    n: int | None = Field(None, ge=1, description="Completions of each prompt; by default the algorithm's group size.")


class AnyArguments(BaseModel):
    """Arguments of a user's function, checked against its signature."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class ComputeArguments(NoArguments):
    """Outputs of a language model."""

    temperature: float | None = Field(
        None, gt=0, description="Divides the logits; by default the sampling.temperature of the run."
    )


class KeptComputeArguments(ComputeArguments):
    """Outputs of a language model that may be kept on disk."""

    cache: bool = Field(
        False,
        description="Keep the results in the run's directory, by model and content: for frozen roles on the flow's own "
        "input. A role that makes no other call is closed before the run's own roles start.",
    )
    data_sources: list[str] | None = Field(
        None, min_length=1, description="Compute only samples of these data sources; the others have zeros."
    )


class TopKArguments(KeptComputeArguments):
    """The most likely tokens."""

    k: int = Field(ge=1)


class TruncatedLogprobsArguments(ComputeArguments):
    """Logprobs among given token ids."""

    kept: str = Field(
        min_length=1, description="Name of the token data [T, K] that holds the ids; generators give kept_ids."
    )


class LogprobsAtArguments(KeptComputeArguments):
    """Logprobs of given token ids."""

    ids: str = Field(min_length=1, description="Name of the token data [T, k] that holds the ids.")
