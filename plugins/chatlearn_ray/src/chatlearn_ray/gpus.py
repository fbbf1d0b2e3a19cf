"""Identifies the GPUs of a slot that the runtime divides, on the machine that has them.

Imports only the standard library, so that environment variables can be set before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(slots=True, frozen=True)
class NodeGpus:
    """GPUs of one node."""

    node: str
    """Ray's identifier of the node."""
    ids: tuple[str, ...]
    """Entries for CUDA_VISIBLE_DEVICES: numbers or UUIDs."""

    def some(self, indices: tuple[int, ...]) -> NodeGpus:
        """Return the GPUs at these indices."""
        return NodeGpus(self.node, tuple(self.ids[index] for index in indices))


def assigned_gpus() -> tuple[str, ...]:
    """Return the GPUs that Ray assigned to this process."""
    import ray

    return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def gpus_of_slot() -> NodeGpus:
    """Return all GPUs of a bundle, in an order that does not depend on Ray; runs as a task that requests
    all of them.
    """
    import ray

    ids = sorted(assigned_gpus(), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
    return NodeGpus(ray.get_runtime_context().get_node_id(), tuple(ids))


def node_here() -> str:
    """Return Ray's identifier of this process's node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())
