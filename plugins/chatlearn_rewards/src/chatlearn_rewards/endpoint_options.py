"""Options of a reward that sends requests to an HTTP endpoint."""

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
    timeout_s: float = Field(
        60.0, gt=0, le=86400, description="Time limit in seconds of one attempt, including its whole response."
    )
    retries: int = Field(
        5,
        ge=0,
        le=100,
        description="Further attempts after status 408, 425, 429 or 5xx, a lost connection, a timeout or a response"
        " that is not JSON.",
    )
    backoff_s: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="Wait in seconds before the second attempt. It doubles with each attempt, and is shortened by up to"
        " half at random.",
    )
    max_wait_s: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="Longest wait in seconds between attempts. If an endpoint requests a longer one (Retry-After), the"
        " request fails.",
    )
    max_concurrent: int = Field(16, ge=1, le=4096, description="Largest number of open requests of a reward worker.")


class JudgeEndpoint(EndpointOptions):
    """A judge behind the chat completions of an OpenAI-compatible endpoint."""

    base_url: str = Field(description="Address of the endpoint up to the version, such as https://api.example.com/v1.")
    model: str = Field(min_length=1, description="Name of the model at the endpoint.")
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of each request, by name; null removes a field that is sent"
        " by default ({seed: null, max_completion_tokens: 512, max_tokens: null}).",
    )

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        return http_address(url, "base_url").rstrip("/")


def http_address(url: str, option: str) -> str:
    """Check an address and return it.

    Raises:
        ValueError: it is not an address, or has parts that are secrets or that requests would drop. The message does
            not show them.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{option} is not an address: {error}") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            f"{option} has a user, a password, a query or a fragment; the run directory records the address,"
            " so put the key into an environment variable and name that in api_key_env"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{option} is {url!r}; it must be an address such as https://api.example.com/v1")
    return url
