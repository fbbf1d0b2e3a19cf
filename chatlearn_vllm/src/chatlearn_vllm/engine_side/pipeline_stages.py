"""Workaround for pipeline parallelism on a CPU."""

from __future__ import annotations

from typing import Any


def make_stage_inputs(model_runner: Any) -> None:
    """Allocate the tensors into which a later pipeline stage receives.

    vLLM 0.32 allocates them in its memory-profiling run. An uncompiled model on a CPU skips that run if the KV cache
    size is given, and its first request then fails an assertion.
    """
    from vllm.distributed import get_pp_group

    if get_pp_group().is_first_rank or getattr(model_runner, "intermediate_tensors", ...) is not None:
        return
    model_runner.intermediate_tensors = model_runner.model.make_empty_intermediate_tensors(
        batch_size=model_runner.max_num_tokens,
        dtype=model_runner.model_config.dtype,
        device=model_runner.device,
    )
