from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chatlearn_core.exceptions import WeightSyncError
from chatlearn_testing.suites import WeightSyncConformance

from acme_plugin.buckets import RankFiles, read_bucket


class TestConformance(WeightSyncConformance):
    backend = "acme"


@pytest.fixture
def files(tmp_path: Path) -> RankFiles:
    return RankFiles(tmp_path, 0)


def test_a_bucket_comes_back_as_it_was_written(files: RankFiles) -> None:
    written = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5], dtype=torch.bfloat16)}
    files.publish_bucket(0, written)
    path = files.bucket(0)
    assert path is not None
    read = read_bucket(path)
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in written)
    assert files.bucket(1) is None


def test_a_changed_byte_is_an_error_that_names_the_file(files: RankFiles) -> None:
    files.publish_bucket(0, {"a": torch.zeros(4)})
    path = files.bucket(0)
    assert path is not None
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match="checksum") as caught:
        read_bucket(path)
    assert path.name in str(caught.value)
