"""Random numbers that depend on (seed, position): a resumed request draws what it would have drawn uninterrupted.

vLLM's first-generation model runner gives a seeded request a generator of its own and draws from it once a token. Two
things are missing there, and added here for each request that enters. A resumed request begins with a fresh generator:
the draws of its earlier tokens are made again and thrown away. And a draw made in the middle of a long prompt, which is
computed in parts, is taken back through the generator's offset, which generators on a CPU do not have: the engine would
end with an error. (The second-generation runner, on GPUs, keys its draws by seed and position itself.)
"""

from __future__ import annotations

from typing import Any

import torch

EXTRA_ARGUMENT = "chatlearn_draws_made"
"""Key of ``SamplingParams.extra_args``: tokens of this request that were sampled before it was submitted."""


class SeededRequests(dict[str, Any]):
    """The model runner's table of requests."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def __setitem__(self, request_id: str, state: Any) -> None:
        """Bring the generator of a request that enters to where it belongs."""
        if request_id not in self and state.generator is not None:
            draws_made = int((state.sampling_params.extra_args or {}).get(EXTRA_ARGUMENT, 0))
            if state.generator.device.type == "cpu":
                state.generator = CPUDraws(state, draws_made)
            else:
                skip_on_device(state.generator, draws_made, self._vocab_size)
        super().__setitem__(request_id, state)


class CPUDraws(torch.Generator):
    """A request's generator on a CPU, from which vLLM takes one integer a token."""

    def __new__(cls, *_: Any) -> CPUDraws:
        """torch's own takes a device here."""
        return super().__new__(cls)

    def __init__(self, state: Any, draws_made: int) -> None:
        """Stand after ``draws_made`` draws.

        Args:
            state: the model runner's record of the request.
            draws_made: tokens that were sampled before the request was submitted.
        """
        self._state = state
        self._draws_made = draws_made
        self._rewind()

    def get_offset(self) -> int:
        """A value for ``set_offset`` to differ from."""
        return 0

    def set_offset(self, offset: int) -> CPUDraws:
        """Take back the last draw: its token was in the middle of the context and is not kept."""
        assert offset < 0, offset
        self._rewind()
        return self

    def _rewind(self) -> None:
        self.manual_seed(self._state.sampling_params.seed)
        for _ in range(self._draws_made + len(self._state.output_token_ids)):
            torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)


def skip_on_device(generator: torch.Generator, num_draws: int, vocab_size: int) -> None:
    """Move a GPU's generator over ``num_draws`` tokens' draws: one exponential for each entry of the vocabulary."""
    if num_draws == 0:
        return
    before = generator.get_offset()
    torch.empty(vocab_size, device=generator.device).exponential_(generator=generator)
    generator.set_offset(before + (generator.get_offset() - before) * num_draws)


def install(model_runner: Any) -> None:
    """Let a first-generation model runner use ``SeededRequests``; nothing to do for the second.

    Raises:
        RuntimeError: the runner has neither form; the version of vLLM is not one this was written for.
    """
    modules = {cls.__module__ for cls in type(model_runner).__mro__}
    if modules & {"vllm.v1.worker.cpu.model_runner", "vllm.v1.worker.gpu.model_runner"}:
        return
    if getattr(model_runner, "requests", None) != {}:
        raise RuntimeError("the model runner has no empty table 'requests'; this vLLM is not one that was tested")
    model_runner.requests = SeededRequests(int(model_runner.input_batch.vocab_size))
