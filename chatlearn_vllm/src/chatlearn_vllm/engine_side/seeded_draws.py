"""Random numbers that depend on (seed, position): a resumed request draws what it would have drawn uninterrupted.

vLLM's first-generation model runner gives a seeded request a generator of its own and draws from it once a token. A
request that is resumed begins with a fresh generator, so the draws that its earlier tokens used up are made again and
thrown away. (The second-generation runner, on GPUs, keys its draws by seed and position itself.)
"""

from __future__ import annotations

from typing import Any

import torch

EXTRA_ARGUMENT = "chatlearn_draws_made"
"""Key of ``SamplingParams.extra_args``: tokens of this request that were sampled before."""


class SeededRequests(dict[str, Any]):
    """The model runner's table of requests; a request that enters it has its generator moved forward."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def __setitem__(self, request_id: str, state: Any) -> None:
        """Advance once, when the request enters."""
        if request_id not in self and state.generator is not None:
            extra = state.sampling_params.extra_args or {}
            advance(state.generator, int(extra.get(EXTRA_ARGUMENT, 0)), self._vocab_size)
        super().__setitem__(request_id, state)


def advance(generator: torch.Generator, num_draws: int, vocab_size: int) -> None:
    """Make ``num_draws`` tokens' draws: on a CPU one integer each, elsewhere one exponential for each vocabulary entry."""
    if num_draws == 0:
        return
    if generator.device.type == "cpu":
        for _ in range(num_draws):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return
    before = generator.get_offset()
    torch.empty(vocab_size, device=generator.device).exponential_(generator=generator)
    step = generator.get_offset() - before
    generator.set_offset(before + step * num_draws)


def install(model_runner: Any) -> None:
    """Let a first-generation model runner use ``SeededRequests``; nothing to do for the second.

    Raises:
        RuntimeError: the runner has neither form; the version of vLLM is not one this was written for.
    """
    if type(model_runner).__module__.startswith("vllm.v1.worker.gpu."):
        return
    bases = {cls.__module__ for cls in type(model_runner).__mro__}
    if "vllm.v1.worker.cpu.model_runner" in bases or "vllm.v1.worker.gpu.model_runner" in bases:
        return
    if getattr(model_runner, "requests", None) != {}:
        raise RuntimeError("the model runner has no empty table 'requests'; this vLLM is not one that was tested")
    model_runner.requests = SeededRequests(int(model_runner.input_batch.vocab_size))
