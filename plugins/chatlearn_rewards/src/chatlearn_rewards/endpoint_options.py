"""Options of a reward that asks an HTTP endpoint."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from chatlearn_rewards.options import RewardOptions


class EndpointOptions(RewardOptions):
    """Access to an endpoint: key, time limit and repetition."""

    api_key_env: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the key, in every process that computes rewards. The key itself "
        "is never part of a configuration.",
    )
    timeout_s: float = Field(60.0, gt=0, le=86400, description="Longest time of one try, with its whole response.")
    retries: int = Field(
        5,
        ge=0,
        le=100,
        description="Further tries after status 408, 425, 429 or 5xx, a lost connection, a timeout or a response that "
        "is no JSON.",
    )
    backoff_s: float = Field(
        1.0, ge=0, le=3600, description="Wait before the second try; it doubles each time, less up to half at random."
    )
    max_wait_s: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="Longest wait between tries. An endpoint that asks for a longer one (Retry-After) has failed.",
    )
    max_concurrent: int = Field(16, ge=1, le=4096, description="Requests that a reward worker has open at a time.")


class JudgeEndpoint(EndpointOptions):
    """A judge behind the chat completions of an OpenAI-compatible endpoint."""

    base_url: str = Field(description="Its address up to the version, such as https://api.example.com/v1.")
    model: str = Field(min_length=1, description="Name of the model there.")
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of each request, by name; null removes one that is sent otherwise "
        "({seed: null, max_completion_tokens: 512, max_tokens: null}).",
    )

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        return http_address(url, "base_url").rstrip("/")


def http_address(url: str, option: str) -> str:
    """``url``, checked.

    Raises:
        ValueError: it is no address, or has parts that are secrets or that requests cannot keep. The message does not
            show them.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{option} is no address: {error}") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            f"{option} has a user, a password, a query or a fragment; an address is written to the run directory, so "
            "put the key into an environment variable and name that in api_key_env"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{option} is {url!r}; it must be an address such as https://api.example.com/v1")
    return url
