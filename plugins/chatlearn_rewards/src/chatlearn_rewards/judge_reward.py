"""Reward ``judge``: a model reads question and answer and grades the answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from chatlearn_core.exceptions import BackendError, ConfigError, DataError, RoleLostError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import UNGRADED, RewardResult, Sample, SamplingParams
from chatlearn_core.types.keyed_seed import keyed_seed
from chatlearn_rewards.answer_cache import AnswerCache, DiskCache, MemoryCache, NoCache
from chatlearn_rewards.endpoint_judge import EndpointJudge
from chatlearn_rewards.http_endpoint import EndpointFailedError
from chatlearn_rewards.judge_model import GeneratorJudge, JudgeModel, Message
from chatlearn_rewards.judge_options import JudgeOptions
from chatlearn_rewards.prompt_reader import Messages, PromptReader
from chatlearn_rewards.question import fill
from chatlearn_rewards.reward_role import RewardRole
from chatlearn_rewards.verdict import VerdictReader

_SHOWN = 200
"""Number of characters of an answer without a verdict that an error quotes."""


@dataclass(slots=True, frozen=True)
class _Vote:
    """The result of the attempts so far."""

    value: float | None
    problem: str = ""
    answered: bool = False
    """Whether the judge answered at all."""


class JudgeReward(RewardRole):
    """Requests a verdict on each sample from a judge.

    Seeds and cache are keyed by the content of the question, so a sample's reward depends neither on timing nor on the
    order of samples with the same text.

    Args:
        judge: the judge; by default the option ``endpoint``, or the generator role under the handle ``judge``.
    """

    def __init__(self, options: JudgeOptions, context: RoleContext, judge: JudgeModel | None = None) -> None:
        if judge is None and options.endpoint is not None:
            judge = EndpointJudge(options.endpoint, f"reward 'judge' of role {context.role!r}")
        if judge is None:
            if "judge" not in context.handles:
                raise ConfigError(
                    f"reward 'judge' of role {context.role!r} has no judge: set uses: {{judge: <generator role>}}, "
                    "or the option endpoint"
                )
            judge = GeneratorJudge(context.handles["judge"])
        self._judge = judge
        self._options = options
        self._context = context
        self._prompts = PromptReader(context.load_tokenizer, f"reward 'judge' of role {context.role!r}")
        self._reader = VerdictReader(options)
        self._open = asyncio.Semaphore(options.max_concurrent)
        self._cache: AnswerCache = NoCache()

    def setup(self) -> None:
        """Open the cache and load the judge's tokenizer.

        Raises:
            ConfigError: the options cache answers of a judge whose weights change, or the cache file cannot be used.
        """
        options = self._options
        self._judge.setup()
        if options.cache == "disk" and not self._judge.is_fixed:
            raise ConfigError(
                f"reward 'judge' of role {self._context.role!r}: cache is disk, but the weights of the judge change in "
                "the run, and with them its answers. Set cache to off, or give the judge a separate model"
            )
        if options.cache_path is not None:
            self._cache = DiskCache(options.cache_path)
        elif options.cache == "memory" and self._judge.is_fixed:
            self._cache = MemoryCache(options.cache_entries)
        super().setup()

    def close(self) -> None:
        super().close()
        self._judge.close()
        self._cache.close()

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """The combined verdicts; components ``votes`` (number of answers with a verdict), and ``ungraded`` where the
        judge gave none and ``nonsense_value`` is set.

        Raises:
            RoleLostError: the judge cannot answer any more questions.
        """
        prompts = await self._prompts.read(samples)
        return list(await asyncio.gather(*map(self._judged, samples, prompts)))

    async def _judged(self, sample: Sample, prompt: Messages) -> RewardResult:
        messages: list[Message] = [{"role": "user", "content": fill(self._options.template, sample, prompt)}]
        if self._options.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._options.system_prompt})
        async with self._open:
            votes = await asyncio.gather(
                *(self._vote(messages, number, sample) for number in range(self._options.votes))
            )
        values = [vote.value for vote in votes if vote.value is not None]
        if values:
            return RewardResult(self._reader.combine(values), {"votes": float(len(values))})
        if self._options.nonsense_value is not None and all(vote.answered for vote in votes):
            return RewardResult(self._options.nonsense_value, {"votes": 0.0, UNGRADED: 1.0})
        return RewardResult(None, error=votes[0].problem)

    async def _vote(self, messages: Sequence[Message], number: int, sample: Sample) -> _Vote:
        """Return the first attempt with a verdict, or the problem of the last attempt."""
        options, vote = self._options, _Vote(None)
        for attempt in range(options.retries + 1):
            temperature = max(options.temperature, options.retry_temperature) if attempt else options.temperature
            sampling = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, top_p=options.top_p)
            content = json.dumps([self._judge.name, messages, asdict(sampling), number, attempt], sort_keys=True)
            digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
            seed = keyed_seed(self._context.seed, "judge", digest)
            try:
                answer = await self._answer(
                    f"{digest}-{seed}", messages, sampling, seed, f"{sample.id}/{number}.{attempt}", sample.group_id
                )
            except RoleLostError:
                raise
            except DataError as error:
                return _Vote(None, f"cannot send the question to the judge: {error}")
            except EndpointFailedError as error:
                return _Vote(None, f"the judge did not answer: {error}")
            except BackendError as error:
                vote = _Vote(None, f"the judge did not answer: {error}")
                continue
            value = self._reader.read(answer)
            if value is not None:
                return _Vote(value, answered=True)
            vote = _Vote(None, f"the judge gave no verdict, but {answer[-_SHOWN:]!r}", answered=True)
        return vote

    async def _answer(
        self,
        key: str,
        messages: Sequence[Message],
        sampling: SamplingParams,
        seed: int,
        request_id: str,
        group_id: str,
    ) -> str:
        """Return the answer from the cache, or from the judge."""
        kept = await asyncio.to_thread(self._cache.get, key)
        if kept is not None:
            return kept
        seeded = SamplingParams(**{**asdict(sampling), "seed": seed})
        answer = await self._judge.answer(messages, seeded, request_id=request_id, group_id=group_id)
        await asyncio.to_thread(self._cache.put, key, answer)
        return answer
