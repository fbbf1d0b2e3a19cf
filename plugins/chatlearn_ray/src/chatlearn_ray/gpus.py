"""The GPUs of a slot that is divided here and not by Ray: which they are, on the machine that has them.

Imports nothing beyond the standard library, so that environment variables are set before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(slots=True, frozen=True)
class NodeGpus:
    """GPUs of one node."""

    node: str
    """Ray's identifier."""
    ids: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them: by number or UUID."""

    def some(self, indices: tuple[int, ...]) -> NodeGpus:
        """Those at these places."""
        return NodeGpus(self.node, tuple(self.ids[index] for index in indices))


def assigned_gpus() -> tuple[str, ...]:
    """The GPUs that Ray assigned to this process."""
    import ray

    return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def gpus_of_slot() -> NodeGpus:
    """What a task that asks Ray for all GPUs of a bundle learns, in an order that does not depend on Ray's."""
    import ray

    ids = sorted(assigned_gpus(), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
    return NodeGpus(ray.get_runtime_context().get_node_id(), tuple(ids))


def node_here() -> str:
    """Ray's identifier of the node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())
