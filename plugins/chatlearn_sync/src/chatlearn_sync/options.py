"""Options of each transport: the keys under ``weight_sync.options``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DirectOptions(BaseModel):
    """``direct`` has no options; ``weight_sync.bucket_mb`` bounds its memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SharedMemoryOptions(BaseModel):
    """Options of ``shared_memory``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slot_mb: int = Field(
        64,
        ge=1,
        description="Amount of data that fills a block before receivers read it, MiB; two blocks alternate. A larger "
        "tensor gets a larger block; weight_sync.bucket_mb / 3 is the upper limit. A model below 8 * slot_mb uses an "
        "eighth of its size, at least 16 MiB. The first fills are smaller, so that loading begins early.",
    )
    verify_checksums: bool = Field(
        False,
        description="Compare a checksum of every tensor while it loads. Off by default: the data never leaves the "
        "host's memory, and comparing costs about as much CPU time as the copy.",
    )


class CudaIpcOptions(BaseModel):
    """Options of ``cuda_ipc``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_mb: int = Field(
        64,
        ge=1,
        description="Size of each of the two blocks on every GPU, MiB; blocks are at least as large as the largest "
        "tensor, and weight_sync.bucket_mb / 4 is the limit otherwise. Blocks are kept until the run ends, because "
        "torch frees exported memory late if no other process opened its handle.",
    )


class BroadcastOptions(BaseModel):
    """Options of ``broadcast``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        description="Backend of torch.distributed. auto: nccl if every end is on a GPU of its own, otherwise gloo.",
    )
    host: str | None = Field(
        None,
        description="Address of the trainer's host that the generators can reach. None: detected automatically.",
    )
    slot_mb: int = Field(
        16,
        ge=1,
        description="Size of each of the two send buffers, MiB. The largest tensor raises it, up to "
        "weight_sync.bucket_mb / 4.",
    )
    verify_checksums: bool = Field(
        True,
        description="Compare a checksum of every tensor: while it loads, or before it loads if the engine's own "
        "processes receive (channel process_group).",
    )


class DeltaOptions(BaseModel):
    """Options of ``delta``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    full_every: int = Field(
        20,
        ge=1,
        description="Write a full version every this many syncs; a restarted replica reads at most this many versions.",
    )
    verify_checksums: bool = Field(
        True, description="Compare the CRC of every file and the checksum of every tensor that changed."
    )


class CheckpointOptions(BaseModel):
    """Options of ``checkpoint``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_shard_mb: int = Field(
        1024, ge=1, description="Size limit of a safetensors file, MiB; weight_sync.bucket_mb / 3 limits it too."
    )
    keep_versions: int = Field(
        1, ge=1, description="Versions kept on disk after a sync; a restarted replica reads the newest."
    )
    verify_checksums: bool = Field(
        True,
        description="Read every byte and compare CRCs before the generator loads. File sizes are always compared.",
    )
