"""Decides whether and where a run resumes: its directory, its checkpoints, and whether the settings still match."""

from __future__ import annotations

import fcntl
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

from chatlearn_core.exceptions import ChatLearnError, CheckpointError, ConfigError
from chatlearn_core.executor.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec
from chatlearn_core.runtime.plan import RunPlan

ResumeMode = Literal["auto", "never"]

BRANCHED_FROM = "branched_from.txt"
"""File in a run directory that names the checkpoint of another directory from which the run started."""
MAY_CHANGE = (
    "log", "checkpoint", "eval", "train.steps", "output_dir", "runtime", "memory", "weight_sync", "roles.*.timeout_s",
    "roles.*.ranks", "roles.*.replicas", "roles.*.device", "rollout.max_retries",
    "rollout.request_timeout_s",
)  # fmt: skip
"""Settings that may differ when a run resumes (``*`` matches one name), because they do not define a step. Some still
affect its numbers: a learning-rate schedule over the whole run is stretched by ``train.steps``, and another number of
ranks, device or number of threads in ``runtime`` rounds differently. Plugins add options of a trainer and arguments of
an engine (``layout_options``, ``layout_arguments``).
"""

_MOST_CHANGES = 8
"""Maximum number of changed settings that an error lists."""


def layout_settings(plan: RunPlan) -> list[str]:
    """Options of trainers and arguments of engines that may differ because their plugins declare so."""
    settings: list[str] = []
    for role in plan.roles.values():
        for backend in role.backends:
            if isinstance(backend.record, TrainerSpec):
                settings += [f"roles.{role.name}.options.{option}" for option in backend.record.layout_options]
            if isinstance(backend.record, TrainerSpec | GeneratorSpec):
                settings += [f"roles.{role.name}.engine.{name}" for name in backend.record.layout_arguments]
    return settings


def fixed_layout(plan: RunPlan) -> dict[str, str]:
    """Settings that may not differ, with the reason: layouts of trainers whose checkpoints depend on them."""
    fixed: dict[str, str] = {}
    for role in plan.roles.values():
        for record in (backend.record for backend in role.backends):
            if (role.trainable or role.refresh) and isinstance(record, TrainerSpec) and not record.reshards:
                reason = f"the trainer '{record.name}' does not load a checkpoint under another layout (reshards)"
                options = [f"options.{option}" for option in record.parallel.values()]
                fixed |= {f"roles.{role.name}.{key}": reason for key in ("ranks", *options)}
    return fixed


@dataclass(slots=True, frozen=True)
class ResumePoint:
    """The checkpoint to start from (None: the beginning), and the problems of skipped checkpoints."""

    checkpoint: Checkpoint | None
    notes: list[str]


def lock_run_directory(path: Path) -> IO[str]:
    """Lock the run's directory for this process; the lock ends when the file is closed or the process ends.

    Raises:
        ConfigError: another process runs in the directory.
        ChatLearnError: the lock cannot be taken for another reason, such as a file that cannot be opened or a file
            system without locks.
    """
    file = path / ".lock"
    try:
        stream = file.open("w")
    except OSError as error:
        raise _cannot_lock(file, error) from error
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise ConfigError(
            f"another process is running in {path}. Wait for it, stop it, or choose another output_dir"
        ) from error
    except OSError as error:
        stream.close()
        raise _cannot_lock(file, error) from error
    return stream


def _cannot_lock(file: Path, error: OSError) -> ChatLearnError:
    return ChatLearnError(
        f"cannot lock {file}: {error.strerror or error}. The lock keeps two processes from running in one directory; "
        "set its permissions right, or choose another output_dir on a file system that has locks"
    )


def find_resume_point(
    store: CheckpointStore,
    resume: ResumeMode | Path,
    config: Mapping[str, Any],
    planned_steps: int,
    *,
    has_metrics: bool,
    is_complete: bool,
    may_change: Collection[str] = (),
    fixed: Mapping[str, str] = MappingProxyType({}),
    rewind: bool = False,
    command: str = "chatlearn run",
    branched_from: str | None = None,
) -> ResumePoint:
    """Decide where the run starts.

    Args:
        store: the run's checkpoints.
        resume: ``auto`` takes the newest complete checkpoint, ``never`` refuses a directory that already holds a run, a
            path names one checkpoint.
        config: the current resolved configuration.
        planned_steps: ``train.steps``.
        has_metrics: whether the directory holds the metrics of a run.
        is_complete: whether that run completed and exported its model.
        may_change: settings that may differ in addition to ``MAY_CHANGE``.
        fixed: settings that may not differ in any case, with the reason.
        rewind: whether newer checkpoints may be deleted, with their metrics and rollouts.
        command: the command that starts the run, for messages.
        branched_from: the checkpoint of another directory from which this directory's run started, if any; the run may
            start from it again.

    Raises:
        CheckpointError: the named checkpoint is damaged, or belongs to a run with other settings; resuming from it
            would delete newer ones, and ``rewind`` is not set; it belongs to another directory, and this one holds a
            run of its own; none of the run's checkpoints can be read.
        ConfigError: no steps are left, or the directory holds a run that may not be resumed.
    """
    notes: list[str] = []
    if resume == "never" and rewind:
        raise ConfigError(
            "--rewind returns to an earlier step of a run, but --resume never starts a new one. Omit one of them"
        )
    checkpoint: Checkpoint | None
    if isinstance(resume, Path):
        named = checkpoint = _named_checkpoint(resume, store)
        is_mine = branched_from == str(named.path.resolve())
        if is_foreign(named, store) and not is_mine and (has_metrics or store.complete()):
            raise CheckpointError(
                f"--resume names {named.path}, and {store.directory.parent} holds a run that did not start from it: "
                "the two would be mixed. Nothing was changed. Choose another output_dir, or omit --resume"
            )
        newer = store.steps_after(named.step)
        if newer and not rewind:
            raise _would_delete(resume, named, store.directory.parent, newer, command)
    else:
        checkpoint, problems = store.newest()
        if checkpoint is None and problems and resume == "auto" and not rewind:
            raise _none_readable(store, problems, command)
        notes += [f"skipped a checkpoint: {problem}" for problem in problems]
        if resume == "never" and (checkpoint is not None or has_metrics):
            raise ConfigError(
                f"{store.directory.parent} already holds a run, but --resume never starts a new one. Choose another "
                "output_dir, or delete that one"
            )
    if checkpoint is None:
        if has_metrics:
            notes.append("no complete checkpoint was found: the run starts from the beginning")
        return ResumePoint(None, notes)
    allowed = (*MAY_CHANGE, *may_change)
    changed: list[str] = []
    for line in changed_settings(checkpoint.state["config"], config):
        reason = fixed.get(line.partition(":")[0])
        if reason is not None:
            changed.append(f"{line}; {reason}")
        elif not is_of(line, allowed):
            changed.append(line)
    if changed:
        left_out = f"\n  ... and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
        raise CheckpointError(
            f"{checkpoint.path} belongs to a run with other settings and cannot be continued:"
            + "".join(f"\n  {line}" for line in changed[:_MOST_CHANGES])
            + f"{left_out}\n  Restore them, or start a new run with another output_dir"
        )
    if checkpoint.step > planned_steps or (checkpoint.step == planned_steps and is_complete):
        raise ConfigError(
            f"the run in {store.directory.parent} is complete: it made {checkpoint.step} of {planned_steps} steps. "
            "Raise train.steps to continue, or choose another output_dir"
        )
    notes.append(f"resuming after step {checkpoint.step} from {checkpoint.path}")
    if note := checkpoint.state.get("note"):
        notes.append(str(note))
    steps_then = checkpoint.state["config"]["train"]["steps"]
    if steps_then != planned_steps:
        notes.append(
            f"train.steps was {steps_then}, is {planned_steps}: a schedule over the run's length continues with the "
            "new length"
        )
    return ResumePoint(checkpoint, notes)


def is_foreign(checkpoint: Checkpoint, store: CheckpointStore) -> bool:
    """Whether a checkpoint belongs to another run's directory."""
    return checkpoint.path.resolve().parent != store.directory.resolve()


def _would_delete(
    named: Path, checkpoint: Checkpoint, run_dir: Path, newer: list[int], command: str
) -> CheckpointError:
    step = checkpoint.step
    back = f"{command} --resume {shlex.quote(str(named))}"
    apart = f"{command} --resume {shlex.quote(str(checkpoint.path))}"  # another directory lacks this step's name
    steps = f"step {newer[0]}" if len(newer) == 1 else f"steps {', '.join(map(str, newer))}"
    return CheckpointError(
        f"{run_dir} has checkpoints of {steps}, newer than {named} (step {step}): to continue from there would delete "
        "them, with the metrics and rollouts after it. Nothing was changed. Run one of\n"
        f"  {command}\n      to continue from the newest,\n"
        f"  {back} --rewind\n      to delete what is newer than step {step} and continue from there,\n"
        f"  {apart} output_dir=ANOTHER\n      to continue from there in another directory and keep everything"
    )


def _none_readable(store: CheckpointStore, problems: list[str], command: str) -> CheckpointError:
    return CheckpointError(
        f"{store.directory} has checkpoints, and none of them can be read:\n  "
        + "\n  ".join(problems)
        + "\nNothing was changed. Check that the storage is mounted and undamaged; then run one of\n"
        f"  {command}\n      to continue from the newest readable one,\n"
        f"  {command} --rewind\n      to delete them, with all metrics and rollouts, and start from the beginning"
    )


def _named_checkpoint(path: Path, store: CheckpointStore) -> Checkpoint:
    if not path.exists() and (short := re.fullmatch(r"step_(\d+)", str(path))):
        path = store.path_of(int(short.group(1)))  # named as in the run's own directory, without leading zeros
    if path.is_dir():
        return read_checkpoint(path)
    there = ", ".join(str(checkpoint.path) for checkpoint in store.complete()) or "none"
    raise CheckpointError(
        f"--resume names {path}, and there is no such directory (checkpoints of {store.directory.parent}: {there}). "
        "Name one of them, or omit --resume to continue from the newest"
    )


def changed_settings(then: Any, now: Any, key: str = "") -> list[str]:
    """Every setting that differs, as ``key: was X, is Y``; a section that only one side has is one line."""
    if isinstance(then, list) and isinstance(now, list):
        then, now = dict(enumerate(then)), dict(enumerate(now))
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        lines: list[str] = []
        for name in sorted(then.keys() | now.keys(), key=str):
            path = f"{key}.{name}" if key else str(name)
            lines += changed_settings(then.get(name), now.get(name), path)
        return lines
    return [] if then == now else [f"{key}: was {_told(then)}, is {_told(now)}"]


def _told(setting: Any) -> str:
    """A value as text; for a section that the other run lacks, only that it exists."""
    return "set" if isinstance(setting, Mapping | list) else "not set" if setting is None else repr(setting)


def is_of(line: str, settings: Collection[str]) -> bool:
    """Whether a line of ``changed_settings`` is about one of these settings or a key below one."""
    key = line.partition(":")[0].split(".")
    return any(_begins(key, setting.split(".")) for setting in settings)


def _begins(key: list[str], allowed: list[str]) -> bool:
    return len(key) >= len(allowed) and all(b in ("*", a) for a, b in zip(key, allowed, strict=False))
