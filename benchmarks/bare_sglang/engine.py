"""One ``sglang.Engine`` and nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class BareEngine:
    """Answers all prompts of a call together. It draws without seeds, which SGLang takes in another mode only."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(**arguments)

    async def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds for all requests, on this process's clock."""
        sampling = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        start = time.perf_counter()
        outputs = await self._engine.async_generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        seconds = time.perf_counter() - start
        assert all(len(output["output_ids"]) == num_tokens for output in outputs)
        return seconds

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
