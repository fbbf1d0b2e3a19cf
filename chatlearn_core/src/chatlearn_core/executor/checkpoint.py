"""Checkpoints on disk: written to a temporary directory, sealed, renamed; later found, verified and thinned out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from chatlearn_core.exceptions import BackendError, CheckpointError, TrainerLostError
from chatlearn_core.metrics.durable_files import file_facts, make_durable, sha256_of
from chatlearn_core.types import FileFacts

SEAL = "checkpoint.json"
"""Written last: the state, and size and checksum of every other file. A directory without it is no checkpoint."""
_NAME = re.compile(r"step_(\d{8})")
_FORMAT = 1


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    state: dict[str, Any]
    """The executor's state: sampler, versions, best metrics, counters; ``config`` holds the run's settings."""

    @property
    def metric(self) -> float | None:
        """The value by which ``keep_best`` ranks the checkpoint."""
        value = self.state.get("metric")
        return None if value is None else float(value)


class CheckpointStore:
    """The checkpoints of one run, in ``directory/step_N``.

    Args:
        keep_last: newest checkpoints to keep.
        keep_best: number of checkpoints with the highest metric to keep in addition.
    """

    def __init__(self, directory: Path, *, keep_last: int, keep_best: int) -> None:
        self.directory = directory
        self.keep_last = keep_last
        self.keep_best = keep_best

    @contextlib.contextmanager
    def write(
        self, step: int, state: dict[str, Any], facts: Mapping[str, FileFacts] = MappingProxyType({})
    ) -> Iterator[Path]:
        """Yield a directory to fill. When the block ends, seal and rename it; if the block raised, remove it.

        Args:
            facts: facts that the writers of some files state when the block ends, by path below the directory. These
                files are only compared in size; all others are read for their checksums.

        Raises:
            CheckpointError: the disk cannot be written (names the path), or a file differs from its writer's facts.
                Earlier checkpoints are untouched.
        """
        final = self.path_of(step)
        temporary = self.directory / f".writing_step_{step:08d}"
        try:
            self._remove_unfinished()
            temporary.mkdir(parents=True)
            yield temporary
            _seal(temporary, step, state, facts)
            if final.exists():
                self._remove(final)
            temporary.rename(final)
            make_durable(self.directory)
        except TrainerLostError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise  # not a disk error: the trainer may be rebuilt
        except (OSError, BackendError) as error:
            room = _room(self.directory)  # measured before the unfinished files are removed
            shutil.rmtree(temporary, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {final}: {reason}{room}. The run can be "
                "resumed from the checkpoint before; free space or permissions on that disk first"
            ) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        try:
            self._thin_out()
        except OSError as error:
            raise CheckpointError(
                f"cannot remove old checkpoints in {self.directory}: {error.strerror or error}. The new one is "
                "complete; set the permissions of that directory right and run again to continue"
            ) from error

    def path_of(self, step: int) -> Path:
        """Path of a step's checkpoint, whether or not it exists."""
        return self.directory / f"step_{step:08d}"

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and the problems of newer ones that were skipped."""
        problems: list[str] = []
        for path in sorted(self._paths(), reverse=True):
            try:
                return read_checkpoint(path), problems
            except CheckpointError as error:
                problems.append(str(error))
        return None, problems

    def complete(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first; does not read the contents of their files."""
        found: list[Checkpoint] = []
        for path in sorted(self._paths()):
            with contextlib.suppress(CheckpointError):
                found.append(read_checkpoint(path, verify=False))
        return found

    def steps_after(self, step: int) -> list[int]:
        """Steps of the checkpoints that ``forget_after`` would remove, complete or damaged, ascending."""
        return sorted(_step_of(path) for path in self._paths() if _step_of(path) > step)

    def forget_after(self, step: int) -> None:
        """Remove checkpoints newer than ``step``, because a run that returns to it writes them again.

        Raises:
            CheckpointError: the storage cannot be changed.
        """
        try:
            for path in self._paths():
                if _step_of(path) > step:
                    self._remove(path)
        except OSError as error:
            raise _cannot_change(self.directory, error) from error

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename damaged checkpoints newer than ``step``, so that new ones can be written; returns their new names.

        Raises:
            CheckpointError: the storage cannot be changed.
        """
        moved: list[Path] = []
        try:
            for path in sorted(self._paths()):
                if _step_of(path) > step:
                    taken = len(list(self.directory.glob(f"damaged_{path.name}*")))
                    aside = path.with_name(f"damaged_{path.name}{f'_{taken + 1}' if taken else ''}")
                    path.rename(aside)
                    moved.append(aside)
        except OSError as error:
            raise _cannot_change(self.directory, error) from error
        return moved

    def _paths(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        try:
            return [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        except OSError as error:
            raise CheckpointError(f"cannot read {self.directory}: {error.strerror or error}") from error

    def _remove(self, path: Path) -> None:
        """Rename, then remove: a process killed meanwhile leaves no partial checkpoint under a valid name."""
        condemned = path.with_name(f".removing_{path.name}")
        shutil.rmtree(condemned, ignore_errors=True)
        path.rename(condemned)
        shutil.rmtree(condemned)

    def remove_unfinished(self) -> None:
        """Remove the partly written or partly removed directories of a killed process.

        Raises:
            CheckpointError: the storage cannot be changed.
        """
        try:
            self._remove_unfinished()
        except OSError as error:
            raise _cannot_change(self.directory, error) from error

    def _remove_unfinished(self) -> None:
        for pattern in (".writing_step_*", ".removing_step_*"):
            for path in self.directory.glob(pattern):
                shutil.rmtree(path)

    def _thin_out(self) -> None:
        checkpoints = self.complete()
        keep = {checkpoint.path for checkpoint in checkpoints[-self.keep_last :]}
        ranked = [checkpoint for checkpoint in checkpoints if checkpoint.metric is not None]
        ranked.sort(key=lambda checkpoint: (checkpoint.metric, checkpoint.step), reverse=True)
        keep |= {checkpoint.path for checkpoint in ranked[: self.keep_best]}
        for checkpoint in checkpoints:
            if checkpoint.path not in keep:
                self._remove(checkpoint.path)


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open one checkpoint.

    Args:
        verify: also read every file and compare its checksum.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged; names the file and the problem.
    """
    try:
        seal = json.loads((path / SEAL).read_text(encoding="utf-8"))
        step, state = int(seal["step"]), dict(seal["state"])
        files = {name: (int(facts["bytes"]), str(facts["sha256"])) for name, facts in seal["files"].items()}
        if seal["format"] != _FORMAT:
            raise CheckpointError(f"{path} has checkpoint format {seal['format']}; this version reads {_FORMAT}")
        if seal.pop("sha256", None) not in (None, _own_checksum(seal)):  # None: written by an earlier version
            raise CheckpointError(f"{path} is damaged: the contents of {SEAL} changed since it was written")
        if _NAME.fullmatch(path.name) and _step_of(path) != step:  # a link, or a directory that was renamed
            raise CheckpointError(
                f"{path} is damaged: {SEAL} is of step {step}, and the directory's name says {_step_of(path)}"
            )
        if not _has_settings(state):
            raise CheckpointError(f"{path} is damaged: {SEAL} has no settings of its run (state.config)")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {SEAL}, written last") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {SEAL}: {error}") from error
    for name, (num_bytes, checksum) in files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != num_bytes:
                raise CheckpointError(f"{path} is damaged: {name} has {size} bytes, {num_bytes} were written")
            if verify and sha256_of(file) != checksum:
                raise CheckpointError(f"{path} is damaged: the contents of {name} changed since it was written")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is damaged: {name} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {name}: {error.strerror or error}") from error
    return Checkpoint(path, step, state)


def _has_settings(state: Mapping[str, Any]) -> bool:
    """Whether the state shows which run the checkpoint belongs to, and the run's planned length."""
    config = state.get("config")
    return isinstance(config, dict) and isinstance(config.get("train"), dict) and "steps" in config["train"]


def _seal(directory: Path, step: int, state: dict[str, Any], facts: Mapping[str, FileFacts]) -> None:
    """Flush the files to disk and write the seal with their sizes and checksums."""
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    if absent := sorted(facts.keys() - set(names)):
        raise CheckpointError(
            f"the checkpoint of step {step} lacks {absent[0]}, which its trainer says it has written; is every rank's "
            "disk the one that this process sees? Put output_dir on a shared one"
        )
    files = {}
    for name in names:
        written = facts.get(name)
        if written is None:
            written = file_facts(directory, [name])[name]
        elif (size := (directory / name).stat().st_size) != written.num_bytes:
            raise CheckpointError(
                f"the checkpoint of step {step} is damaged: {name} has {size} bytes, but its"
                f" trainer reported {written.num_bytes}"
            )
        files[name] = {"bytes": written.num_bytes, "sha256": written.sha256}
    seal = directory / SEAL
    content = {"format": _FORMAT, "step": step, "state": state, "files": files}
    seal.write_text(json.dumps({**content, "sha256": _own_checksum(content)}, indent=1))
    make_durable(seal)
    for inner in sorted(path for path in directory.rglob("*") if path.is_dir()):
        make_durable(inner)
    make_durable(directory)


def _own_checksum(content: Mapping[str, Any]) -> str:
    """Checksum of the seal itself, so that a corrupted number in the state is noticed."""
    as_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _cannot_change(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot move or remove checkpoints in {directory}: {error.strerror or error}. Set the permissions of that "
        "directory right, or choose another output_dir"
    )


def _room(directory: Path) -> str:
    """The free space as text: errors from writers of tensors do not say that the disk is full."""
    try:
        return f" ({shutil.disk_usage(directory).free / 2**20:,.0f} MiB were free)"
    except OSError:
        return ""  # the directory itself may be what is missing


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))
