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
    old = time.time() - 2 * library.LONGEST_BUILD_S
    os.utime(lock, (old, old))
    with pytest.raises(BackendError, match=f"delete it: rm {lock}"):
        library.wait_for_lock(tmp_path)


def test_a_young_lock_is_waited_for(tmp_path, monkeypatch) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setattr(library.time, "sleep", lambda seconds: lock.unlink())
    library.wait_for_lock(tmp_path)
    assert not lock.exists()


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
