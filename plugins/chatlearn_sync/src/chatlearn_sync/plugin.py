"""Registers the transports of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import WeightSyncSpec


@hookimpl
def chatlearn_weight_syncs() -> Iterable[WeightSyncSpec]:
    """Return this distribution's transports, from the shortest reach to the longest."""
    return [
        WeightSyncSpec(
            name="direct",
            summary="Hands tensors over inside one process, without a copy.",
            sender="chatlearn_sync.direct:DirectSender",
            receiver="chatlearn_sync.direct:DirectReceiver",
            options="chatlearn_sync.options:DirectOptions",
            exports=("full_tensors",),
            whole_only="a trainer in the generator's process has a single rank, which holds every tensor whole",
            channels=("tensors",),
            reach="process",
            speed_rank=10,
        ),
        WeightSyncSpec(
            name="cuda_ipc",
            summary="Blocks of GPU memory that trainer and engine ranks on the same GPUs share.",
            sender="chatlearn_sync.cuda_ipc:CudaIpcSender",
            receiver="chatlearn_sync.cuda_ipc:CudaIpcReceiver",
            options="chatlearn_sync.options:CudaIpcOptions",
            exports=("full_tensors",),
            whole_only="every engine rank reads the whole model on its own GPU, where trainer ranks gathered it",
            channels=("memory_handles",),
            reach="host",
            within_hosts=True,
            needs_gpus=True,
            needs_same_gpus=True,
            speed_rank=15,
        ),
        WeightSyncSpec(
            name="shared_memory",
            summary="Shared memory on one host, which generators read in place.",
            sender="chatlearn_sync.shared_memory:SharedMemorySender",
            receiver="chatlearn_sync.shared_memory:SharedMemoryReceiver",
            options="chatlearn_sync.options:SharedMemoryOptions",
            exports=("full_tensors", "boxes"),
            channels=("memory_handles", "boxes", "tensors"),
            reach="host",
            within_hosts=True,
            payloads=frozenset({"full", "adapter"}),
            speed_rank=20,
        ),
        WeightSyncSpec(
            name="broadcast",
            summary="Process groups of torch.distributed, gloo or NCCL, one for each trainer rank that owns weights.",
            sender="chatlearn_sync.broadcast:BroadcastSender",
            receiver="chatlearn_sync.broadcast_receiver:BroadcastReceiver",
            options="chatlearn_sync.options:BroadcastOptions",
            exports=("full_tensors", "boxes"),
            channels=("process_group", "boxes", "tensors"),
            reach="anywhere",
            payloads=frozenset({"full", "adapter"}),
            per_replica=False,
            speed_rank=50,
        ),
        WeightSyncSpec(
            name="delta",
            summary="Only the changes, bit-exact, as files on a disk that both ends share.",
            sender="chatlearn_sync.delta:DeltaSender",
            receiver="chatlearn_sync.delta_receiver:DeltaReceiver",
            options="chatlearn_sync.options:DeltaOptions",
            exports=("full_tensors",),
            whole_only="each owner finds changes by comparing with its copy of the last version, which is whole",
            channels=("memory_handles", "tensors"),
            reach="anywhere",
            payloads=frozenset({"full", "delta"}),
            replayable=True,
            speed_rank=80,
        ),
        WeightSyncSpec(
            name="checkpoint",
            summary="Safetensors files with checksums on a disk that both ends share; restarted replicas reread them.",
            sender="chatlearn_sync.checkpoint:CheckpointSender",
            receiver="chatlearn_sync.checkpoint:CheckpointReceiver",
            options="chatlearn_sync.options:CheckpointOptions",
            exports=("full_tensors", "boxes"),
            channels=("checkpoint", "boxes", "tensors"),
            reach="anywhere",
            replayable=True,
            speed_rank=90,
        ),
    ]
