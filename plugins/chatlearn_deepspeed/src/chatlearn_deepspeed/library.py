"""Imports DeepSpeed, and changes what it does to a process on import and at the start.

Tested with DeepSpeed 0.19.8; every other version is refused, because this module replaces two of its functions:

- ``deepspeed.comm.torch.build_shm_op`` compiles an all-reduce over shared memory when a process group starts on a CPU.
  That takes minutes, without a word, in every new environment.
- ``OpBuilder.jit_load`` compiles operators on first use. Without ``build_ops`` it raises an error that names the
  operator. With it, the build is logged, and a lock file that a killed build left behind is an error; torch would wait
  for it forever.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from chatlearn_core.exceptions import BackendError

logger = logging.getLogger(__name__)

TESTED_VERSION = "0.19.8"
INSTALL = f"DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed=={TESTED_VERSION}"
LONGEST_BUILD_S = 900.0
"""A lock that is older belongs to no running build: the slowest operator takes a few minutes."""
POLL_S = 0.5
LOG_EVERY_S = 30.0
"""A run that waits says so this often."""


class _Builds:
    """Whether roles of this process allow DeepSpeed to compile."""

    are_allowed = False


def load_deepspeed(device: torch.device, *, build_ops: bool) -> Any:
    """Import DeepSpeed for a device, with its silent builds switched off.

    Args:
        device: device of the role.
        build_ops: whether DeepSpeed may compile operators.

    Raises:
        BackendError: DeepSpeed is missing, of another version, or already in use on another kind of device.
    """
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendError(
            f"the trainer 'deepspeed' needs DeepSpeed, which is not installed here; run `{INSTALL}`"
        ) from error
    if version != TESTED_VERSION:
        raise BackendError(
            f"the trainer 'deepspeed' is tested with DeepSpeed {TESTED_VERSION} only, and {version} is installed; run"
            f" `{INSTALL}`"
        )
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # its import sets a level of its own
    kind = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if torch.device(kind).type != device.type:
        raise BackendError(
            f"DeepSpeed already works on {kind} in this process, but this role is on {device}; place the roles in"
            " processes of their own, or unset DS_ACCELERATOR"
        )
    # DeepSpeed 0.19.8 calls collectives by the names that torch 2.13 replaced.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
    _Builds.are_allowed = _Builds.are_allowed or build_ops
    _switch_off_builds(device)
    return deepspeed


def _switch_off_builds(device: torch.device) -> None:
    builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    if not getattr(builder.jit_load, "is_guarded", False):
        compile_op = builder.jit_load

        def guarded(op: Any, verbose: bool = True) -> Any:
            directory = build_directory(op.name)
            if not _Builds.are_allowed:
                raise BackendError(
                    f"DeepSpeed would compile its operator {op.name!r} into {directory} now, which takes minutes; set"
                    " options.build_ops: true to allow it, or leave out the setting that needs it"
                )
            wait_for_lock(directory)
            logger.warning("DeepSpeed compiles its operator %r into %s; this takes minutes", op.name, directory)
            return compile_op(op, verbose)

        guarded.is_guarded = True  # type: ignore[attr-defined]  # marks the replacement
        builder.jit_load = guarded
    # The attribute deepspeed.comm.torch is torch itself, not this module.
    backend: Any = sys.modules["deepspeed.comm.torch"]
    if device.type == "cpu" and not _Builds.are_allowed:
        backend.build_shm_op = lambda: None


def build_directory(name: str) -> Path:
    """Return the folder into which torch builds an operator: below ``TORCH_EXTENSIONS_DIR``, or torch's default."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def wait_for_lock(directory: Path, longest_s: float = LONGEST_BUILD_S) -> None:
    """Wait for another process that builds the same operator, and log that at the start and every ``LOG_EVERY_S``.

    Args:
        directory: of the build.
        longest_s: age in seconds at which a lock is taken for a remnant, whoever has it open.

    Raises:
        BackendError: the lock is a remnant of a build that was killed; the message names the file.
    """
    lock = directory / "lock"
    waited = 0.0
    while True:
        in_use = _is_open(directory)
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age > longest_s or in_use is False:
            why = f"it is {age:.0f} s old" + ("" if in_use else ", and no process of this machine has it open")
            raise BackendError(
                f"{lock} is a remnant of a build of a DeepSpeed operator that was killed: {why}. torch would wait for"
                f" it forever. If no other machine builds there, delete it: rm {lock}"
            )
        if waited % LOG_EVERY_S == 0:
            logger.warning("waiting for another process that builds in %s (lock of %.0f s ago)", directory, age)
        time.sleep(POLL_S)
        waited += POLL_S


def _is_open(directory: Path) -> bool | None:
    """Whether a process works in a directory or has a file in it open; None where the system does not say.

    A process that this one may not look at has other privileges, and is no build of the same user.
    """
    place, processes = str(directory.resolve()), list(Path("/proc").glob("[0-9]*"))
    for process in processes:
        links = [process / "cwd"]
        with contextlib.suppress(OSError):
            links += (process / "fd").iterdir()
        for link in links:
            with contextlib.suppress(OSError):  # also: ended or closed meanwhile
                target = str(link.readlink())
                if target == place or target.startswith(place + os.sep):
                    return True
    return False if processes else None


def start_communication(device: torch.device) -> None:
    """Make DeepSpeed use the default process group, which must exist."""
    comm = importlib.import_module("deepspeed.comm")
    comm.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
    )


def forget_communication() -> None:
    """Drop DeepSpeed's references to process groups, after the default group was destroyed."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = None
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    groups._release_process_group_references()
