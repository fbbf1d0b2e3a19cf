"""A judge behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import SamplingParams
from chatlearn_rewards.endpoint_options import JudgeEndpoint
from chatlearn_rewards.http_endpoint import HttpEndpoint
from chatlearn_rewards.judge_model import Message


class EndpointJudge:
    """Asks ``POST <base_url>/chat/completions``, the chat completions of OpenAI's API. Implements ``JudgeModel``.

    Args:
        what: name of the reward for error messages.

    Raises:
        ConfigError: the environment variable with the key is not set.
    """

    def __init__(self, options: JudgeEndpoint, what: str) -> None:
        self._options = options
        self._endpoint = HttpEndpoint(
            f"{options.base_url}/chat/completions", options, what, "the options endpoint.base_url and endpoint.model"
        )

    @property
    def name(self) -> str:
        """Address, model and further fields, on which an answer depends."""
        fields = json.dumps(self._options.parameters, sort_keys=True)
        return f"{self._options.base_url} {self._options.model} {fields}"

    @property
    def is_fixed(self) -> bool:
        """Always true: the endpoint is assumed to keep the same model under a name."""
        return True

    def setup(self) -> None:
        """Start the thread of the connections; sends nothing."""
        self._endpoint.start()

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    async def answer(
        self, messages: Sequence[Message], sampling: SamplingParams, *, request_id: str, group_id: str
    ) -> str:
        """Return the text of the next turn; empty if the response has no text.

        Raises:
            DataError, RoleLostError, EndpointFailedError: see ``HttpEndpoint.post``.
            BackendError: the response is not a chat completion.
        """
        fields: dict[str, Any] = {
            "model": self._options.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            **self._options.parameters,
        }
        response = await self._endpoint.post({name: value for name, value in fields.items() if value is not None})
        try:
            content = response["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = response
        if content is not None and not isinstance(content, str):
            raise BackendError(
                f"{self._options.base_url}: the response has no text at choices[0].message.content; base_url must lead "
                "to chat completions as OpenAI defines them"
            )
        return content or ""
