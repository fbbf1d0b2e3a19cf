"""Logprobs of given tokens at any temperature.

vLLM computes logprobs of a prompt's tokens (``prompt_logprobs``) from logits that it does not divide by the request's
temperature. The first-generation model runner handles one request after the other, so that this module can divide them:
it replaces the runner's table of such requests, which it iterates over, and the function that turns logits into
logprobs. The second-generation runner, on GPUs, computes whole batches; there, temperature 1 alone is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

TEMPERATURE = "chatlearn_score_temperature"
"""Key in ``SamplingParams.extra_args``: divides the logits of the request's prompt."""


class ScoredPrompts(dict[str, int]):
    """Replacement for the model runner's table of requests that ask for logprobs of their prompt."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._model_runner = model_runner
        self._compute = model_runner.sampler.compute_logprobs
        self._temperature = 1.0

    def items(self) -> Iterator[tuple[str, int]]:  # type: ignore[override]  # the runner only iterates over it
        """Yield each request; meanwhile its temperature is the one that ``compute`` divides by."""
        for request_id, count in super().items():
            parameters = self._model_runner.requests[request_id].sampling_params
            self._temperature = float((parameters.extra_args or {}).get(TEMPERATURE, 1.0))
            yield request_id, count
        self._temperature = 1.0

    def compute(self, logits: Tensor) -> Tensor:
        """Logprobs of logits, [N, V]."""
        logprobs: Tensor = self._compute(logits if self._temperature == 1.0 else logits / self._temperature)
        return logprobs


def install(model_runner: Any) -> bool:
    """Make a first-generation model runner use ``ScoredPrompts``. Returns whether it is one.

    Raises:
        RuntimeError: the runner matches neither generation, so this vLLM version is not supported.
    """
    if hasattr(model_runner, "prompt_logprobs_worker"):
        return False
    if getattr(model_runner, "num_prompt_logprobs", None) != {} or not hasattr(
        model_runner.sampler, "compute_logprobs"
    ):
        raise RuntimeError(
            "the model runner has no empty table 'num_prompt_logprobs', or its sampler no compute_logprobs; this vLLM "
            "version is not supported"
        )
    table = ScoredPrompts(model_runner)
    model_runner.num_prompt_logprobs = table
    model_runner.sampler.compute_logprobs = table.compute
    return True
