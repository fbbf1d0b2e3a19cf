"""Pipeline parallelism on a CPU."""

from __future__ import annotations

from typing import Any


def make_stage_inputs(model_runner: Any) -> None:
    """Make the tensors into which a later pipeline stage receives.

    vLLM 0.32 makes them in the run that measures memory, which an uncompiled model on a CPU skips if the size of the KV
    cache is given: its first request then ends in an assertion.
    """
    from vllm.distributed import get_pp_group

    if get_pp_group().is_first_rank or getattr(model_runner, "intermediate_tensors", ...) is not None:
        return
    model_runner.intermediate_tensors = model_runner.model.make_empty_intermediate_tensors(
        batch_size=model_runner.max_num_tokens,
        dtype=model_runner.model_config.dtype,
        device=model_runner.device,
    )
