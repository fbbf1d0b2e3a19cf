"""The process groups that vLLM keeps for a whole process, made fit for another engine in it.

All engines of one process share vLLM's groups, which for a single worker hold this process alone and carry nothing. The
first engine makes them, on the default group of ``torch.distributed`` that it makes too or finds there, a trainer's.
"""

from __future__ import annotations

import torch.distributed as dist


def make_way_for_groups() -> None:
    """Let the next engine make vLLM's groups anew where those that exist do not serve it.

    They do not if the default group that they were made on was taken down since, by the trainer that owned it; or if an
    engine without experts made them, which has no group for experts.
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
        # Only forgotten: what they were is gone with the default group.
        assert hasattr(parallel_state, name), f"vllm.distributed.parallel_state has no {name}"
        setattr(parallel_state, name, None)
