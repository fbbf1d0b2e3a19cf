import os
import pickle
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from chatlearn_core.exceptions import CheckpointError
from chatlearn_fsdp.sharded_reader import ALLOWED, ShardedReader, TensorPlanner


class Hostile:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory) -> None:
        self.directory = directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory),)


@pytest.fixture
def saved(tmp_path):
    content = {
        "model": {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.ones(2).long()},
        "optimizer": {"a": {"step": torch.tensor(7.0)}},
    }
    save_sharded(content, checkpoint_id=tmp_path / "shards", no_dist=True)
    return tmp_path / "shards"


def empty():
    return {
        "model": {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16), "c": torch.zeros(2).long()},
        "optimizer": {"a": {"step": torch.tensor(0.0)}},
    }


def read(directory, content) -> None:
    load_sharded(content, storage_reader=ShardedReader(directory), planner=TensorPlanner(), no_dist=True)


def index_of(directory):
    return pickle.loads((directory / ".metadata").read_bytes())


def test_files_written_by_torch_are_read(saved) -> None:
    content = empty()
    read(saved, content)
    assert torch.equal(content["model"]["a"], torch.arange(3.0))
    assert content["model"]["b"].sum() == 4
    assert content["model"]["c"].tolist() == [1, 1]
    assert content["optimizer"]["a"]["step"] == 7


@pytest.mark.parametrize("place", ["whole", "planner_data", "state_dict_metadata", "storage_meta"])
def test_an_index_cannot_execute(saved, tmp_path, place) -> None:
    hostile = Hostile(tmp_path / "executed")
    index = hostile if place == "whole" else replace(index_of(saved), **{place: hostile})
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"\.metadata refers to posix\.mkdir.*nothing was executed"):
        read(saved, empty())
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "name",
    ["os system", "builtins eval", "builtins getattr", "torch load", "torch os.system", "torch.serialization pickle"],
)
def test_names_outside_the_list_are_refused(saved, name) -> None:
    module, attribute = name.split()
    (saved / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(CheckpointError, match="which no index"):
        read(saved, empty())


CALLED = {name: made for name, made in ALLOWED.items() if callable(made) and made is not torch.Size}  # it is immutable


def plant(directory, made: bytes) -> None:
    """Before the index: set the attribute ``planted`` of what these opcodes make."""
    attack = b"%s(N(S'planted'\nctorch\nSize\ndtb0" % made
    (directory / ".metadata").write_bytes(attack + (directory / ".metadata").read_bytes())


@pytest.mark.parametrize("name", CALLED, ids=".".join)
def test_an_index_cannot_change_the_objects_it_names(saved, name) -> None:
    plant(saved, "c{}\n{}\n".format(*name).encode())
    try:
        read(saved, content := empty())
        assert content["model"]["c"].tolist() == [1, 1]
        assert not hasattr(CALLED[name], "planted")
    finally:
        with suppress(AttributeError):
            del CALLED[name].planted


def test_an_index_cannot_change_a_member_that_all_share(saved) -> None:
    member = _MEM_FORMAT_ENCODING(0)
    plant(saved, f"c{_MEM_FORMAT_ENCODING.__module__}\n_MEM_FORMAT_ENCODING\n(I0\ntR".encode())
    try:
        with pytest.raises(CheckpointError, match=r"\.metadata changes a member of _MEM_FORMAT_ENCODING"):
            read(saved, empty())
        assert not hasattr(member, "planted")
    finally:
        vars(member).pop("planted", None)


def test_the_index_of_a_rank_is_not_tried_instead(saved, tmp_path) -> None:
    (saved / ".metadata").unlink()
    (saved / "__0.metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
    with pytest.raises(FileNotFoundError):
        read(saved, empty())
    assert not (tmp_path / "executed").exists()


def test_an_entry_that_torch_would_unpickle_is_refused(saved) -> None:
    index = index_of(saved)
    index.state_dict_metadata["model.a"] = BytesStorageMetadata()
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
        read(saved, empty())


@pytest.mark.parametrize("path", ["../other.distcp", "/etc/passwd", "..", ""])
def test_files_elsewhere_are_refused(saved, path) -> None:
    index = index_of(saved)
    key = next(iter(index.storage_data))
    index.storage_data[key] = replace(index.storage_data[key], relative_path=path)
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="must be in its own directory"):
        read(saved, empty())


def test_a_shard_cannot_execute(saved, tmp_path) -> None:
    index = index_of(saved)
    torch.save(Hostile(tmp_path / "executed"), saved / "__0_0.distcp")
    size = (saved / "__0_0.distcp").stat().st_size
    for key, place in index.storage_data.items():
        index.storage_data[key] = replace(place, offset=0, length=size)
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(BaseException, match=r"posix\.mkdir"):  # torch's error is no Exception
        read(saved, empty())
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"N.", b"]q\x00.", b"\xff" * 50, b"(" * 100_000 + b"."])
def test_damage_and_attacks_get_different_errors(saved, content) -> None:
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(pickle.UnpicklingError):
        read(saved, empty())
