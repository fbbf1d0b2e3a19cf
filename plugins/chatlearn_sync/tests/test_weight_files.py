from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from safetensors import safe_open

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_sync.weight_files import (
    WeightIndex,
    merge_indexes,
    read_index,
    tensor_crc32,
    verify_files,
    write_index,
    write_shard,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_checksum_is_of_the_bytes_in_memory(dtype):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = torch.from_numpy(values).to(dtype)
    expected = bytes(tensor.untyped_storage())
    assert tensor_crc32(tensor) == zlib.crc32(expected)


def test_an_index_survives_the_disk(tmp_path):
    tensors = (("a", torch.ones(2, 3)), ("b", torch.zeros((), dtype=torch.bfloat16)))
    entry, entries = write_shard(tmp_path / "one.safetensors", tensors)
    index = WeightIndex("s", 4, "trainer", {"one.safetensors": entry}, entries, {"c": "a"})
    write_index(tmp_path, index)
    assert read_index(tmp_path) == index
    assert index.num_bytes == (tmp_path / "one.safetensors").stat().st_size
    assert index.manifest().tensors["a"].shape == (2, 3)
    assert index.manifest().tensors["b"].dtype == "bfloat16"
    verify_files(tmp_path, index, checksums=True)
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses files without it


def test_an_index_of_another_format_is_refused(tmp_path):
    (tmp_path / "chatlearn_weights.json").write_text('{"format": 1}')
    with pytest.raises(WeightSyncError, match=r"chatlearn_weights.json: its format is not 2"):
        read_index(tmp_path)


def test_ranks_are_merged_unless_they_overlap(tmp_path):
    parts = []
    for rank in range(2):
        file = f"{rank}.safetensors"
        entry, entries = write_shard(tmp_path / file, ((f"t{rank}", torch.zeros(2)),))
        parts.append(WeightIndex("s", 1, "trainer", {file: entry}, entries, {}))
    merged = merge_indexes(parts)
    assert merged.tensors.keys() == {"t0", "t1"}
    assert merged.files.keys() == {"0.safetensors", "1.safetensors"}
    with pytest.raises(WeightSyncError, match="two ranks streamed the same tensors: t0"):
        merge_indexes([parts[0], parts[0]])
