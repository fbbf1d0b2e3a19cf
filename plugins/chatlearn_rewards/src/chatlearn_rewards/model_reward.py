"""Reward ``model``: a reward model's score of each sample."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chatlearn_chat.messages import text_of
from chatlearn_core.exceptions import ConfigError, DataError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import OutputRequest, RewardResult, Sample, TokenIds, pack_samples
from chatlearn_rewards.model_options import ModelOptions
from chatlearn_rewards.prompt_reader import Messages, PromptReader
from chatlearn_rewards.question import fill
from chatlearn_rewards.reward_role import RewardRole


@dataclass(slots=True, frozen=True)
class _Shown:
    """A sample in the form that the model receives."""

    sample: Sample
    prompt_ids: TokenIds
    completion_ids: TokenIds


class ModelReward(RewardRole):
    """The score of a trainer role with head ``reward`` or of a sequence classifier that a generator role serves, or a
    score from a generator role's logprobs.

    A group is scored as soon as it is complete, while other groups are still sampled. Each group is one call, so the
    content of a forward pass, and with it the last bits of a score, does not depend on timing.
    """

    def __init__(self, options: ModelOptions, context: RoleContext) -> None:
        if "model" not in context.handles:
            raise ConfigError(
                f"reward 'model' of role {context.role!r} has no model: set uses: {{model: <trainer or generator "
                "role>}"
            )
        self._options = options
        self._role = context.role
        self._model = context.handles["model"]
        self._prompts = PromptReader(context.load_tokenizer, f"reward 'model' of role {context.role!r}")

    def setup(self) -> None:
        """Load the tokenizer if text is rendered.

        Raises:
            ConfigError: an option does not apply to this kind of role.
        """
        if self._options.question is not None and self._model.kind == "trainer":
            raise ConfigError(
                f"reward 'model' of role {self._role!r}: question is for a generator role, and role "
                f"{self._model.role!r} is a trainer, whose head gives the score. Remove question"
            )
        if self._options.question is not None and self._model.classifies:
            raise ConfigError(
                f"reward 'model' of role {self._role!r}: question asks a language model, and generator role "
                f"{self._model.role!r} serves a sequence classifier, whose score is the reward. Remove question"
            )
        if not self._options.token_ids:
            _ = self._model.renderer
        super().setup()

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """The component ``score`` is the model's number, before the options ``transform`` to ``clip`` change it.

        Raises:
            BackendError: the model failed or did not answer.
        """
        groups: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            groups.setdefault(sample.group_id, []).append(index)
        results: dict[int, RewardResult] = {}

        async def group(indices: list[int]) -> None:
            results.update(zip(indices, await self._scored([samples[i] for i in indices]), strict=True))

        await asyncio.gather(*(group(indices) for indices in groups.values()))
        return [results[index] for index in range(len(samples))]

    async def _scored(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Score one group."""
        prompts: list[Messages] = [() for _ in samples]
        if not self._options.token_ids:
            prompts = await self._prompts.read(samples)
        shown: list[_Shown | str] = []
        for sample, messages in zip(samples, prompts, strict=True):
            try:
                shown.append(self._shown(sample, messages))
            except DataError as error:
                shown.append(f"the reward model cannot score sample {sample.id!r}: {error}")
        usable = [each for each in shown if isinstance(each, _Shown)]
        scores = iter(await self._scores(usable) if usable else [])
        return [
            RewardResult(None, error=each) if isinstance(each, str) else self._result(next(scores)) for each in shown
        ]

    async def _scores(self, shown: Sequence[_Shown]) -> list[float]:
        if self._model.kind == "generator":
            return list(await asyncio.gather(*(self._by_generator(each) for each in shown)))
        batch = pack_samples([_bare(each) for each in shown])
        outputs = await self._model.compute(batch, OutputRequest(frozenset({"scores"}), 1.0))
        return [float(score) for score in outputs["scores"].tolist()]

    async def _by_generator(self, shown: _Shown) -> float:
        """Return the classifier's score, the expected label, or the mean logprob of the sampled tokens."""
        sample = shown.sample
        if self._model.classifies:
            whole = np.concatenate([np.asarray(shown.prompt_ids), np.asarray(shown.completion_ids)])
            return await self._model.classify(whole, request_id=sample.id, group_id=sample.group_id)
        if self._options.question is None:
            logprobs = await self._model.score(
                shown.prompt_ids, shown.completion_ids, request_id=sample.id, group_id=sample.group_id
            )
            sampled = np.asarray(sample.loss_mask)[-len(logprobs) :] if self._options.token_ids else np.s_[:]
            return float(np.mean(np.asarray(logprobs)[sampled], dtype=np.float64))
        totals: list[float] = []
        for label in self._options.answers:
            logprobs = await self._model.score(
                shown.prompt_ids,
                self._label_ids(label),
                request_id=f"{sample.id}/{label}",
                group_id=sample.group_id,
            )
            totals.append(float(np.sum(logprobs, dtype=np.float64)))
        weights = np.exp(np.array(totals) - max(totals))
        return float(np.dot(weights / weights.sum(), list(self._options.answers.values())))

    def _label_ids(self, label: str) -> TokenIds:
        return np.asarray(self._model.tokenizer.encode(label, add_special_tokens=False), np.int64)

    def _shown(self, sample: Sample, messages: Messages) -> _Shown:
        """Return the model's input, with the messages of the prompt where text is rendered.

        Raises:
            DataError: the model cannot take this sample.
        """
        options, start = self._options, sample.num_prompt_tokens
        if options.question is not None:
            question = self._model.renderer.prompt(
                [{"role": "user", "content": fill(options.question, sample, messages)}]
            )
            longest = max(len(self._label_ids(label)) for label in options.answers)
            return self._checked(_Shown(sample, question.token_ids, np.zeros(longest, np.int64)))
        if options.input == "tokens":
            return self._checked(_Shown(sample, sample.token_ids[:start], sample.token_ids[start:]))
        has_template = self._model.tokenizer.chat_template is not None
        prompt = messages if has_template else _text_before(sample, messages)
        rendered = self._model.renderer.demonstration(prompt, sample.text)
        return self._checked(_Shown(sample, rendered.prompt.token_ids, rendered.completion_ids))

    def _checked(self, shown: _Shown) -> _Shown:
        length = len(shown.prompt_ids) + len(shown.completion_ids)
        if length > self._model.max_length:
            raise DataError(f"it has {length} tokens, and role {self._model.role!r} takes {self._model.max_length}")
        if not len(shown.completion_ids):
            raise DataError("its completion is empty")
        return shown

    def _result(self, score: float) -> RewardResult:
        options = self._options
        if not math.isfinite(score):
            return RewardResult(None, error=f"the score of role {self._model.role!r} is {score}")
        value = 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, score)))) if options.transform == "sigmoid" else score
        value = (value - options.mean) / options.std * options.scale
        if options.clip is not None:
            value = max(-options.clip, min(options.clip, value))
        return RewardResult(value, {"score": score})


def _text_before(sample: Sample, messages: Messages) -> str:
    """The prompt for a model without a chat template. A completion goes on where the policy read the same text; the
    policy's chat template set it apart, and here a blank line does.
    """
    text = "\n\n".join(text_of(message) for message in messages)
    return text if sample.prompt.text == text else f"{text}\n\n"


def _bare(shown: _Shown) -> Sample:
    """Return tokens without other data, as one sequence of a batch."""
    sample = shown.sample
    token_ids = np.concatenate([np.asarray(shown.prompt_ids), np.asarray(shown.completion_ids)]).astype(np.int64)
    mask = np.arange(len(token_ids)) >= max(1, len(shown.prompt_ids))
    return Sample(sample.id, sample.group_id, sample.prompt, token_ids, mask, len(shown.prompt_ids))
