"""What a configuration may set under ``weight_sync.options``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DirectOptions(BaseModel):
    """``direct`` has nothing to set: its memory is ``weight_sync.bucket_mb``."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SharedMemoryOptions(BaseModel):
    """Options of ``shared_memory``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slot_mb: int = Field(
        64,
        ge=1,
        description="Bytes of each of the two blocks that are filled before they are read, MiB; a larger tensor needs "
        "more, and weight_sync.bucket_mb / 3 bounds it. A small model uses an eighth of its size, at least 16 MiB; the "
        "first parts are smaller, so that loading begins early.",
    )
    verify_checksums: bool = Field(
        False,
        description="Compare a checksum of every tensor while it is loaded. Off by default: the bytes stay where they "
        "were written, and comparing costs about as much CPU time again as the copy.",
    )


class CudaIpcOptions(BaseModel):
    """Options of ``cuda_ipc``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_mb: int = Field(
        64,
        ge=1,
        description="Size of each of the two blocks on every GPU, MiB, where no tensor is larger; "
        "weight_sync.bucket_mb / 4 bounds it. They are kept until the run ends: memory that another process was given "
        "the handle of, and did not open, comes back late.",
    )


class BroadcastOptions(BaseModel):
    """Options of ``broadcast``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="Of torch.distributed. auto: nccl where every end is on a GPU of its own, else gloo."
    )
    host: str | None = Field(
        None, description="Address of the trainer's host that the generators reach; found by itself where possible."
    )
    slot_mb: int = Field(
        16,
        ge=1,
        description="Size of each flat buffer, MiB, where no tensor is larger; weight_sync.bucket_mb / 4 bounds it.",
    )
    verify_checksums: bool = Field(
        True,
        description="Compare a checksum of every tensor: while it is loaded, or before, where the engine's own "
        "processes receive (channel process_group).",
    )


class DeltaOptions(BaseModel):
    """Options of ``delta``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    full_every: int = Field(
        20, ge=1, description="Syncs from one full version to the next: a replica that comes back reads as many."
    )
    verify_checksums: bool = Field(
        True, description="Compare the CRC of every file and the checksum of every tensor that changed."
    )


class CheckpointOptions(BaseModel):
    """Options of ``checkpoint``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_shard_mb: int = Field(
        1024, ge=1, description="Largest safetensors file, MiB; weight_sync.bucket_mb bounds it as well."
    )
    keep_versions: int = Field(
        1, ge=1, description="Versions left on the disk after a sync, so that a restarted replica can take the newest."
    )
    verify_checksums: bool = Field(
        True,
        description="Read every byte back and compare its CRC before the generator loads; sizes are always checked.",
    )
