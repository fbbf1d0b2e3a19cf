"""Options of the reward ``http``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from chatlearn_rewards.endpoint_options import EndpointOptions, http_address

SAMPLES = "samples"
"""Field of a request that holds the samples."""


class HttpOptions(EndpointOptions):
    """Where samples are sent, what of them, and in what portions."""

    url: str = Field(description="Address that each request is posted to, such as https://rewards.example.com/score.")
    columns: tuple[str, ...] = Field(
        (), description="Columns of the dataset row that are sent besides prompt, completion and ground truth."
    )
    token_ids: bool = Field(
        False, description="Send the ids of the completion's tokens, for a server that scores single tokens."
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of each request, by name, beside samples."
    )
    batch_size: int = Field(
        16,
        ge=1,
        le=4096,
        description="Samples that a request has at most. Which samples share one is a matter of timing, so a sample's "
        "score must not depend on the others.",
    )
    batch_wait_s: float = Field(
        0.05, ge=0, le=60, description="Longest wait of a request that is not full for further samples, seconds."
    )
    deadline_s: float = Field(
        600.0,
        gt=0,
        le=86400,
        description="Longest time from when a sample is to be scored until its score: waiting for others, all tries "
        "and the waits between them. A sample without a score by then is excluded.",
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        return http_address(url, "url")

    @field_validator("parameters")
    @classmethod
    def _leaves_the_samples(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if SAMPLES in parameters:
            raise ValueError(f"parameters has {SAMPLES!r}, the field that holds the samples; use another name")
        return parameters
