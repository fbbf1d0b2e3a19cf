"""Adds a seed to each request through SGLang's own hooks.

SGLang can draw each token by (seed, position), but does so only in its deterministic mode, which changes every kernel
and does not exist on CPUs. Seeded draws do not need that mode: this hook gives the sampler its seeds.
"""

from __future__ import annotations

from typing import Any

import torch

TARGET = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"


def register() -> None:
    """Register the hook; SGLang applies it in every process when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    HookRegistry.register(TARGET, add_seeds, HookType.AFTER, source=HookSource("chatlearn_seeds", "chatlearn-sglang"))


def add_seeds(info: Any, _: type, batch: Any, vocab_size: int) -> Any:
    """Set the seeds of a batch before it is sampled, where SGLang has set none."""
    if info.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
    return info
