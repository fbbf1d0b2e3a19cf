"""Reward ``http``: a server scores batches of samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chatlearn_core.exceptions import DataError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.completion_steps import StepTokens
from chatlearn_rewards.http_endpoint import EndpointFailedError, HttpEndpoint
from chatlearn_rewards.http_options import SAMPLES, HttpOptions
from chatlearn_rewards.http_scores import Scored, UnusableResponseError, read_scores, sample_row
from chatlearn_rewards.prompt_reader import PromptReader
from chatlearn_rewards.request_batcher import RequestBatcher
from chatlearn_rewards.reward_role import RewardRole


@dataclass(slots=True, frozen=True, eq=False)
class _Row:
    """A sample that is to be sent."""

    content: dict[str, Any]
    num_tokens: int
    deadline: float
    """Reading of ``time.monotonic()``."""


class HttpReward(RewardRole):
    """Posts samples to a server and takes its scores.

    A request that fails for all its samples, or a response that does not fit its request, is followed by a request for
    each sample alone, so that a sample that the server cannot score spoils no other: timing decides which samples
    share a request, and must not decide which are scored.

    Raises:
        ConfigError: the environment variable with the key is not set.
    """

    def __init__(self, options: HttpOptions, context: RoleContext) -> None:
        self._options = options
        what = f"reward 'http' of role {context.role!r}"
        self._endpoint = HttpEndpoint(options.url, options, what, "the option url")
        self._prompts = PromptReader(context.load_tokenizer, what)
        self._tokens = StepTokens(context.load_tokenizer, what)
        self._batcher = RequestBatcher(
            self._send,
            batch_size=options.batch_size,
            wait_s=options.batch_wait_s,
            max_batches=options.max_concurrent,
        )

    def setup(self) -> None:
        """Start the connections' thread; nothing is sent."""
        self._endpoint.start()
        super().setup()

    def close(self) -> None:
        super().close()
        self._endpoint.close()

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """The server's scores; its metrics are components.

        Raises:
            RoleLostError: the server refuses every request (a wrong key, a wrong address).
        """
        deadline = time.monotonic() + self._options.deadline_s
        rows: list[_Row | RewardResult] = []
        for sample, messages in zip(samples, await self._prompts.read(samples), strict=True):
            try:
                rows.append(_Row(sample_row(sample, self._options, messages), sample.num_completion_tokens, deadline))
            except DataError as error:
                rows.append(RewardResult(None, error=f"it cannot be sent: {error}"))
        if not any(isinstance(row, _Row) for row in rows):
            return [row for row in rows if isinstance(row, RewardResult)]
        found = await self._endpoint.run(self._results(rows))
        return [
            await self._tokens.with_steps(each.result, sample, each.more)
            for each, sample in zip(found, samples, strict=True)
        ]

    async def _results(self, rows: Sequence[_Row | RewardResult]) -> list[Scored]:
        """Runs in the endpoint's thread, as everything below."""
        asked = [self._batcher.ask(row) for row in rows if isinstance(row, _Row)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        if failures := [each for each in found if isinstance(each, BaseException)]:
            raise failures[0]
        answers = iter([each for each in found if isinstance(each, Scored)])
        return [next(answers) if isinstance(row, _Row) else Scored(row, {}) for row in rows]

    async def _send(self, rows: Sequence[_Row]) -> list[Scored]:
        """One request; if it fails, one for each sample that has time left."""
        ids = _unique([str(row.content["id"]) for row in rows])
        sent = [{**row.content, "id": one} for row, one in zip(rows, ids, strict=True)]
        body = {**self._options.parameters, SAMPLES: sent}
        try:
            response = await self._endpoint.post_here(body, min(row.deadline for row in rows))
            results = read_scores(response, ids)
        except (DataError, EndpointFailedError, UnusableResponseError) as error:
            problem = Scored(RewardResult(None, error=self._endpoint.without_key(str(error))), {})
        else:
            return [Scored(self._checked(each.result, row), each.more) for each, row in zip(results, rows, strict=True)]
        if len(rows) == 1:
            return [problem]
        return list(await asyncio.gather(*(self._alone(row, problem) for row in rows)))

    async def _alone(self, row: _Row, problem: Scored) -> Scored:
        return problem if time.monotonic() >= row.deadline else (await self._send([row]))[0]

    def _checked(self, result: RewardResult, row: _Row) -> RewardResult:
        """What a server repeats of a request's headers is not written."""
        if result.error is not None:
            return RewardResult(None, error=self._endpoint.without_key(result.error))
        if result.token_values is not None and len(result.token_values) != row.num_tokens:
            given = len(result.token_values)
            return RewardResult(
                None, error=f"the server gives {given} token_values for the {row.num_tokens} tokens of the completion"
            )
        return result


def _unique(ids: Sequence[str]) -> list[str]:
    """The ids, those that occur again with a number behind them: one sample may be scored in two calls at a time."""
    seen: dict[str, int] = {}
    unique = []
    for one in ids:
        seen[one] = seen.get(one, 0) + 1
        unique.append(one if seen[one] == 1 else f"{one}~{seen[one]}")
    return unique
