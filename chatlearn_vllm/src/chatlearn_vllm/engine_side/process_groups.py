"""Prepares vLLM's process-wide process groups for another engine in the same process.

All engines of a process share vLLM's groups. For a single worker they contain only this process and carry no traffic.
The first engine creates them on the default group of ``torch.distributed``, which it creates too unless a trainer
already has.
"""

from __future__ import annotations

import torch.distributed as dist


def discard_stale_groups() -> None:
    """Discard vLLM's groups if the next engine cannot use them; that engine then creates new ones.

    An engine cannot use them if the trainer that owned their default group has destroyed it, or if an engine without
    experts created them, because then there is no group for experts.
    """
    from vllm.distributed import parallel_state

    world = parallel_state._WORLD
    if world is None:
        return
    if dist.is_initialized() and world.device_group in dist.distributed_c10d._world.pg_map:
        if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
            parallel_state.destroy_model_parallel()
        return
    for name in ("_WORLD", "_NODE_COUNT", "_TP", "_ETP", "_PP", "_DP", "_EP", "_PCP", "_DCP", "_EPLB", "_ENGRAM_DP"):
        # Only clear the reference: the groups were destroyed with the default group.
        assert hasattr(parallel_state, name), f"vllm.distributed.parallel_state has no {name}"
        setattr(parallel_state, name, None)
