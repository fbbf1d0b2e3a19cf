"""Versions, builds and locks."""

from __future__ import annotations

import os
import time

import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_deepspeed import library


def test_a_missing_deepspeed_names_the_command(monkeypatch) -> None:
    def missing(name):
        raise library.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library.importlib.metadata, "version", missing)
    with pytest.raises(BackendError, match=r"DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0\.19\.8"):
        library.load_deepspeed(torch.device("cpu"), build_ops=False)


def test_another_version_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(library.importlib.metadata, "version", lambda name: "0.20.0")
    with pytest.raises(BackendError, match=r"tested with DeepSpeed 0\.19\.8 only, and 0\.20\.0 is installed"):
        library.load_deepspeed(torch.device("cpu"), build_ops=False)


def test_a_lock_of_a_killed_build_is_named(tmp_path) -> None:
    library.wait_for_lock(tmp_path)
    lock = tmp_path / "lock"
    lock.touch()
    with pytest.raises(BackendError, match=rf"no process of this machine has it open.*delete it: rm {lock}"):
        library.wait_for_lock(tmp_path)
    old = time.time() - 2 * library.LONGEST_BUILD_S
    os.utime(lock, (old, old))
    with lock.open(), pytest.raises(BackendError, match=f"it is 1800 s old. .*delete it: rm {lock}"):
        library.wait_for_lock(tmp_path)


def test_a_build_under_way_is_waited_for_and_logged(tmp_path, monkeypatch, caplog) -> None:
    """For 40 seconds of polls: a line at the start, and one after 30."""
    lock, polls = tmp_path / "lock", []

    def sleep(seconds) -> None:
        polls.append(seconds)
        if sum(polls) >= 40:
            lock.unlink()

    monkeypatch.setattr(library.time, "sleep", sleep)
    with lock.open("w"):
        library.wait_for_lock(tmp_path)
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"waiting for another process that builds in {tmp_path}"
    ] * 2


def test_a_lock_may_be_in_use_where_processes_cannot_be_seen(tmp_path, monkeypatch) -> None:
    assert library._is_open(tmp_path) is False
    monkeypatch.setattr(library.Path, "glob", lambda *_: iter(()))
    assert library._is_open(tmp_path) is None


@pytest.mark.engine
@pytest.mark.slow
def test_a_build_is_refused_by_name(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library.load_deepspeed(torch.device("cpu"), build_ops=False)
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    monkeypatch.setattr(library._Builds, "are_allowed", False)
    with pytest.raises(BackendError, match=rf"compile its operator 'cpu_adam' into {tmp_path}.*build_ops: true"):
        CPUAdamBuilder().jit_load(verbose=False)


@pytest.mark.engine
@pytest.mark.slow
def test_an_allowed_build_stops_at_a_stale_lock(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library.load_deepspeed(torch.device("cpu"), build_ops=False)
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    monkeypatch.setattr(library._Builds, "are_allowed", True)
    lock = library.build_directory("cpu_adam") / "lock"
    lock.touch()
    os.utime(lock, (0, 0))
    with pytest.raises(BackendError, match=f"rm {lock}"):
        CPUAdamBuilder().jit_load(verbose=False)
