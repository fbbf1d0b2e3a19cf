"""Reward ``function``: a user's plain Python function, in one of the two common signatures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import UNGRADED, RewardResult, Sample
from chatlearn_rewards.completion_steps import StepTokens
from chatlearn_rewards.options import FunctionOptions
from chatlearn_rewards.pooled_reward import PooledReward, result_from_outcome
from chatlearn_rewards.process_pool import Outcome, Task


class FunctionReward(PooledReward):
    """Calls the function in workers: a crash, a hang or a wrong value marks the samples of that call.

    - ``compute_score(data_source, solution_str, ground_truth, extra_info=None)`` -> number, or dict with ``score``
    - ``f(prompts, completions, **columns)`` -> list of numbers or None; may be a coroutine
    """

    def __init__(self, options: FunctionOptions, context: RoleContext) -> None:
        arguments = {
            "path": options.path,
            "signature": options.signature,
            "conversational": options.conversational,
            "directory": str(Path.cwd()),
        }
        task = Task("chatlearn_rewards.function_calling:build_function_caller", arguments)
        super().__init__("function", task, options, context)
        self._options = options
        self._tokens = StepTokens(context.load_tokenizer, f"reward 'function' of role {context.role!r}")

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Components are the other numbers of a returned dict; ``steps``, (end, reward) of each, become
        rewards of tokens; None from the function is the error "no score".
        """
        size = self._options.batch_size
        calls = [samples[start : start + size] for start in range(0, len(samples), size)]
        payloads = [[_row(sample) for sample in call] for call in calls]
        outcomes = await self._pool.run(payloads, [self._options.timeout_s * len(call) for call in calls])
        results: list[RewardResult] = []
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome.exhausted and self._options.ungraded_score is not None:
                results += [RewardResult(self._options.ungraded_score, {UNGRADED: 1.0}) for _ in call]
            elif outcome.error is not None:
                results += [RewardResult(None, error=outcome.error) for _ in call]
            else:
                for sample, verdict in zip(call, outcome.value, strict=True):
                    results.append(
                        await self._tokens.with_steps(result_from_outcome(Outcome(verdict)), sample, verdict)
                    )
        return results


def _row(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    return {
        "data_source": prompt.data_source,
        "solution_str": sample.text,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.columns.get("extra_info"),
        "prompt": prompt.text,
        "messages": [dict(message) for message in prompt.messages],
        "columns": dict(prompt.columns),
        "completion_ids": sample.completion_ids.tolist(),
    }
