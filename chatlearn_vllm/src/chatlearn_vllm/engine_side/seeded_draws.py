"""Random numbers that depend only on (seed, position), so that a resumed request draws as if uninterrupted.

vLLM's first-generation model runner gives each seeded request a generator and draws from it once per token. It lacks
two things, which this module adds. First, a resumed request starts with a fresh generator: the draws of its earlier
tokens are repeated and discarded. Second, in chunked prefill vLLM undoes a draw through the generator's offset, which
CPU generators do not have, so the engine would end with an error. (The second-generation runner, on GPUs, keys its
draws by seed and position itself.)
"""

from __future__ import annotations

from typing import Any

import torch

EXTRA_ARGUMENT = "chatlearn_draws_made"
"""Key in ``SamplingParams.extra_args``: number of this request's tokens that were sampled before it was submitted."""


class SeededRequests(dict[str, Any]):
    """Replacement for the model runner's table of requests."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def __setitem__(self, request_id: str, state: Any) -> None:
        """Advance the generator of a new request to its position."""
        if request_id not in self and state.generator is not None:
            draws_made = int((state.sampling_params.extra_args or {}).get(EXTRA_ARGUMENT, 0))
            if state.generator.device.type == "cpu":
                state.generator = CPUDraws(state, draws_made)
            else:
                skip_on_device(state.generator, draws_made, self._vocab_size)
        super().__setitem__(request_id, state)


class CPUDraws(torch.Generator):
    """The CPU generator of one request, from which vLLM draws one integer per token."""

    def __new__(cls, *_: Any) -> CPUDraws:
        """Ignore the arguments, since torch's ``__new__`` would take them as a device."""
        return super().__new__(cls)

    def __init__(self, state: Any, draws_made: int) -> None:
        """Start after ``draws_made`` draws.

        Args:
            state: the model runner's record of the request.
            draws_made: number of tokens that were sampled before the request was submitted.
        """
        self._state = state
        self._draws_made = draws_made
        self._rewind()

    def get_offset(self) -> int:
        """Return a base value, from which vLLM computes the argument of ``set_offset``."""
        return 0

    def set_offset(self, offset: int) -> CPUDraws:
        """Undo the last draw: its token was sampled in the middle of the prompt and is discarded."""
        assert offset < 0, offset
        self._rewind()
        return self

    def _rewind(self) -> None:
        self.manual_seed(self._state.sampling_params.seed)
        for _ in range(self._draws_made + len(self._state.output_token_ids)):
            torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)


def skip_on_device(generator: torch.Generator, num_draws: int, vocab_size: int) -> None:
    """Advance a GPU generator by ``num_draws`` tokens; each takes one exponential for each entry of the vocabulary."""
    if num_draws == 0:
        return
    before = generator.get_offset()
    torch.empty(vocab_size, device=generator.device).exponential_(generator=generator)
    generator.set_offset(before + (generator.get_offset() - before) * num_draws)


def install(model_runner: Any) -> None:
    """Make a first-generation model runner use ``SeededRequests``. The second generation needs no change.

    Raises:
        RuntimeError: the runner matches neither form, so this vLLM version is not supported.
    """
    modules = {cls.__module__ for cls in type(model_runner).__mro__}
    if modules & {"vllm.v1.worker.cpu.model_runner", "vllm.v1.worker.gpu.model_runner"}:
        return
    if getattr(model_runner, "requests", None) != {}:
        raise RuntimeError("the model runner has no empty table 'requests'; this vLLM version is not supported")
    model_runner.requests = SeededRequests(int(model_runner.input_batch.vocab_size))
