"""Conversion of a checkpoint for other trainers: weights go through model directories, everything else stays."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from chatlearn_core.config.recorded import recorded_values
from chatlearn_core.exceptions import CheckpointError, ConfigError
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.checkpoint import SEAL, Checkpoint, CheckpointStore
from chatlearn_core.executor.component_factory import build_runtime
from chatlearn_core.executor.resume import MAY_CHANGE, changed_settings, is_of, layout_settings, lock_run_directory
from chatlearn_core.metrics.run_directory import RunDirectory
from chatlearn_core.types import FileFacts

TRAINER_SETTINGS = ("backend", "options", "engine", "ranks", "device", "timeout_s")
"""Settings of a role that a conversion may change."""


async def convert(checkpoint: Checkpoint, before: Assembly, after: Assembly) -> tuple[Path, list[str]]:
    """Write a checkpoint of ``after`` that continues ``checkpoint``, a checkpoint of ``before``.

    Trained roles whose trainer has other settings are exported as model directories by the old trainer and read by the
    new one, whose optimizer starts anew. Other roles, the place in the data, unfinished rollouts and the run's own
    state are copied.

    Returns:
        path of the new checkpoint, and the names of the converted roles.

    Raises:
        CheckpointError: the runs differ in more than their trainers, or the checkpoint cannot be written.
        ConfigError: the new run's directory holds a run, or no trainer differs.
    """
    roles = _saved_roles(after)
    settings = recorded_values(after.loaded)
    converted = _changed_roles(checkpoint, settings, roles, [before, after])
    directory = RunDirectory(after.plan.run_dir)
    store = CheckpointStore(directory.checkpoints, keep_last=1, keep_best=0)
    with ExitStack() as stack:
        stack.enter_context(lock_run_directory(directory.path))
        if directory.metrics_file.exists() or store.complete():
            raise ConfigError(f"{directory.path} already holds a run; choose another output_dir for the converted one")
        exports = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="converting_", dir=directory.path)))
        for role in converted:
            await _export(before, role, checkpoint.path / "roles" / role, exports / role)
        note = (
            f"the checkpoint was converted from {checkpoint.path}: the optimizers of {', '.join(converted)} and their"
            " learning-rate schedules start anew"
        )
        facts: dict[str, FileFacts] = {}
        with store.write(checkpoint.step, {**checkpoint.state, "config": settings, "note": note}, facts) as new:
            for entry in checkpoint.path.iterdir():
                if entry.is_dir() and entry.name != "roles":
                    shutil.copytree(entry, new / entry.name)
                elif entry.is_file() and entry.name != SEAL:
                    shutil.copy2(entry, new / entry.name)
            for role in roles:
                if role in converted:
                    saved = await _save(after, role, exports / role, new / "roles" / role)
                    facts |= {f"roles/{role}/{name}": one for name, one in saved.items()}
                else:
                    shutil.copytree(checkpoint.path / "roles" / role, new / "roles" / role)
    return store.path_of(checkpoint.step), converted


def _saved_roles(assembly: Assembly) -> list[str]:
    """Return the roles that a checkpoint holds."""
    saved = (*assembly.learning.learners, *assembly.plan.refreshes)
    return [name for name in assembly.plan.roles if name in saved]


def _changed_roles(
    checkpoint: Checkpoint, settings: Mapping[str, Any], roles: Sequence[str], assemblies: Sequence[Assembly]
) -> list[str]:
    """Return the saved roles whose trainers differ.

    Raises:
        CheckpointError: something else differs, too.
        ConfigError: no trainer differs.
    """
    lines = changed_settings(checkpoint.state["config"], settings)
    changed = [role for role in roles if any(is_of(line, _of_trainer(role)) for line in lines)]
    allowed = [*MAY_CHANGE, *(key for role in roles for key in _of_trainer(role))]
    for assembly in assemblies:
        allowed += layout_settings(assembly.plan)
    others = [line for line in lines if not is_of(line, allowed)]
    if others:
        raise CheckpointError(
            f"{checkpoint.path} belongs to a run that differs in more than its trainers:"
            + "".join(f"\n  {line}" for line in others)
            + "\n  Restore these settings; a conversion changes the backend, options, engine, ranks and device of"
            " trained roles"
        )
    if not changed:
        raise ConfigError(
            f"no trainer of {checkpoint.path} has other settings now: run the configuration, which continues from it"
        )
    return changed


def _of_trainer(role: str) -> list[str]:
    return [f"roles.{role}.{key}" for key in TRAINER_SETTINGS]


async def _export(assembly: Assembly, role: str, saved: Path, directory: Path) -> None:
    """Start one role, load its part of a checkpoint, and write its model."""
    runtime = build_runtime(_alone(assembly, role))
    try:
        await runtime.start()
        await runtime.trainer(role).load(saved)
        await runtime.trainer(role).export_model(directory)
    finally:
        await runtime.close()


async def _save(assembly: Assembly, role: str, model: Path, directory: Path) -> Mapping[str, FileFacts]:
    """Start one role with the weights of a model directory, and write its part of a checkpoint."""
    runtime = build_runtime(_alone(assembly, role, model))
    try:
        await runtime.start()
        saved: Mapping[str, FileFacts] = await runtime.trainer(role).save(directory)
    finally:
        await runtime.close()
    return saved


def _alone(assembly: Assembly, name: str, model: Path | None = None) -> Assembly:
    """Return the assembly with one role alone, which reads another model if one is given."""
    role = assembly.plan.roles[name]
    if model is not None:
        assert role.model is not None, f"role {name} is trained and has a model"
        role = replace(role, model=replace(role.model, path=str(model)))
    return replace(assembly, plan=replace(assembly.plan, roles={name: role}, weight_syncs=()))
