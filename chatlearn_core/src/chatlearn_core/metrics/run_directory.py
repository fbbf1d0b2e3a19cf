"""A run's directory: its files, and how a resumed run continues them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy.typing as npt

from chatlearn_core.exceptions import BackendError, ChatLearnError, TrainerLostError
from chatlearn_core.metrics.durable_files import (
    Line,
    append_lines,
    is_temporary,
    json_line,
    make_durable,
    read_lines,
    replace_file,
)
from chatlearn_core.metrics.timers import Timers
from chatlearn_core.types import Sample

FAILURE_PAGE = "failure.md"
"""The page about a failed run. Observers and runtimes write it; a resumed run removes it."""
_WRITING_MODEL = ".writing_model"
_REPLACED_MODEL = ".replaced_model"


class RunDirectory:
    """Files of one run: ``config.yaml``, ``metrics.jsonl``, ``rollouts/``, ``checkpoints/``, ``summary.json``,
    ``events.jsonl``, ``trace.jsonl``. Observers add theirs.

    Raises:
        ChatLearnError: the directory cannot be created or written; names the path and the cause.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[Path] = set()
        """Files whose content a power failure could still lose."""
        try:
            for directory in (path, path / "rollouts", path / "checkpoints"):
                directory.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            try:
                probe.write_text("x")
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(path, error) from error

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace_file(self) -> Path:
        return self.path / "trace.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Directory of the exported model."""
        return self.path / "model"

    @contextmanager
    def replacing_model(self) -> Iterator[Path]:
        """Yield a directory to fill, which becomes ``model`` when the block ends, so that ``model`` is always complete.

        Raises:
            ChatLearnError: the disk cannot be written; an earlier model is untouched.
        """
        aside = self.path / _WRITING_MODEL
        try:
            shutil.rmtree(aside, ignore_errors=True)
            yield aside
            for path in (*aside.rglob("*"), aside):
                make_durable(path)
            replaced = self.path / _REPLACED_MODEL
            shutil.rmtree(replaced, ignore_errors=True)
            if self.model.exists():
                self.model.rename(replaced)
            aside.rename(self.model)
            shutil.rmtree(replaced, ignore_errors=True)
        except TrainerLostError:
            shutil.rmtree(aside, ignore_errors=True)
            raise  # not a disk error: the trainer may be rebuilt and export again
        except (OSError, BackendError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise _cannot_write(self.model, error) from error

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one line to ``metrics.jsonl``: ``{"step": ..., name: value, ...}``."""
        self._append(self.metrics_file, {"step": step, **_finite(metrics)})

    def append_trace(self, step: int, timers: Timers, during: str | None = None) -> None:
        """Add the trace of ``timers`` to ``trace.jsonl``: each action with its role and times.

        Args:
            during: the activity it was part of, if not the step itself.
        """
        extra = {} if during is None else {"during": during}
        self._append(self.trace_file, *({"step": step, **entry, **extra} for entry in timers.trace()))

    def append_event(self, event: str, **facts: Any) -> dict[str, Any]:
        """Add one line to ``events.jsonl``: an event outside the normal course of steps, with its time (UTC)."""
        record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **facts}
        self._append(self.path / "events.jsonl", record)
        return record

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines of ``metrics.jsonl``; a line truncated by a kill or a full disk is left out.

        Raises:
            ChatLearnError: the file cannot be read.
        """
        return [line.record for line in self._read_steps(self.metrics_file)[0]]

    def read_summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty before the run first ended, or if the file is damaged."""
        try:
            content = json.loads((self.path / "summary.json").read_bytes())
        except (OSError, ValueError, RecursionError):  # its content can be determined again
            return {}
        return content if isinstance(content, dict) else {}

    def rewind(self, step: int) -> list[str]:
        """Remove everything written after ``step``, because a resumed run writes it again. Removes broken lines, too.

        Returns:
            a sentence for each file that had broken lines.

        Raises:
            ChatLearnError: the storage cannot be changed.
        """
        repaired: list[str] = []
        for file in (self.metrics_file, self.trace_file):
            lines, broken = self._read_steps(file)
            kept = [line.content for line in lines if line.record["step"] <= step]
            if broken or len(kept) < len(lines):
                self._replace(file, b"".join(kept))
            if broken:
                repaired.append(
                    f"{file} had broken lines, which were removed: {', '.join(map(str, broken[:5]))}"
                    f"{' and more' if len(broken) > 5 else ''}. A write was cut short, or the file was changed by hand"
                )
        try:
            for file in (self.path / "rollouts").glob("*_*.jsonl"):
                number = file.stem.rpartition("_")[2]
                if number.isdecimal() and int(number) > step:
                    file.unlink()
                    self._written.discard(file)
        except OSError as error:
            raise _cannot_write(self.path / "rollouts", error) from error
        return repaired

    def remove_unfinished(self) -> None:
        """Remove temporary files and an unfinished export of a killed process.

        Raises:
            ChatLearnError: the storage cannot be changed.
        """
        try:
            for directory in (self.path, self.path / "rollouts"):
                for file in directory.iterdir():
                    if is_temporary(file):
                        file.unlink()
            if (self.path / _REPLACED_MODEL).exists() and not self.model.exists():
                (self.path / _REPLACED_MODEL).rename(self.model)
            for name in (_WRITING_MODEL, _REPLACED_MODEL):
                if (self.path / name).exists():
                    shutil.rmtree(self.path / name)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def make_durable(self) -> None:
        """Flush everything written to disk, because a checkpoint that survives a power failure continues from it.

        Raises:
            OSError: the storage cannot be written.
        """
        for path in (*self._written, self.path, self.path / "rollouts"):
            make_durable(path)
        self._written.clear()

    def write_rollouts(self, step: int, samples: Iterable[Sample], kind: str = "step") -> None:
        """Write ``rollouts/{kind}_N.jsonl``: one line per sample, with the data that the report's browser shows.

        Args:
            step: the step whose weights sampled them.
            samples: in the order of the prompts.
            kind: ``step`` for training rollouts, ``eval`` for those of an evaluation.
        """
        content = b"".join(json_line(rollout_record(step, sample)) for sample in samples)
        self._replace(self.path / "rollouts" / f"{kind}_{step:06d}.jsonl", content, durable=False)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a JSON file atomically."""
        self._replace(self.path / name, json_line(content, indent=2))

    def write_text(self, name: str, text: str) -> None:
        """See the function ``write_text``."""
        write_text(self.path / name, text)

    def read_text(self, name: str) -> str | None:
        """The text that ``write_text`` wrote; None if there is no such file."""
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ChatLearnError(f"cannot read {self.path / name}: {error.strerror or error}") from error

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from error

    def _append(self, file: Path, *records: Mapping[str, Any]) -> None:
        self._written.add(file)
        try:
            append_lines(file, records)
        except OSError as error:
            raise _cannot_write(file, error) from error

    def _replace(self, file: Path, content: bytes, *, durable: bool = True) -> None:
        try:
            replace_file(file, content, durable=durable)
        except OSError as error:
            raise _cannot_write(file, error) from error
        if not durable:
            self._written.add(file)

    def _read_steps(self, file: Path) -> tuple[list[Line], list[int]]:
        """Complete lines of steps, and the numbers of broken lines."""
        try:
            lines, broken = read_lines(file)
        except OSError as error:
            raise ChatLearnError(
                f"cannot read {file}: {error.strerror or error}. Repair the storage or the file's permissions, or "
                "choose another directory with output_dir=..."
            ) from error
        of_steps = [line for line in lines if isinstance(line.record.get("step"), int)]
        return of_steps, sorted({*broken, *(line.number for line in lines)} - {line.number for line in of_steps})


def recorded_fields(samples: Iterable[Sample]) -> frozenset[str]:
    """The fields whose values ``rollout_record`` writes."""
    names = frozenset(name for sample in samples for name, of in sample.token_data.items() if _is_recorded(name, of))
    return names | {"token_ids", "text"}


def _is_recorded(name: str, values: npt.NDArray[Any]) -> bool:
    return (name.endswith("_logprobs") or name == "advantages") and values.ndim == 1


def rollout_record(step: int, sample: Sample) -> dict[str, Any]:
    """One line of a rollouts file, for a sample with plain arrays. Lists have one number per completion token."""
    start = sample.num_prompt_tokens
    last = sample.last_turn
    reward = sample.reward
    record: dict[str, Any] = {
        "step": step,
        "id": sample.id,
        "group": sample.group_id,
        "data_source": sample.prompt.data_source,
        "prompt": sample.prompt.text,
        "ground_truth": sample.prompt.ground_truth,
        "completion": sample.text if last else None,
        "finish_reason": last.finish_reason if last else None,
        "reward": reward.value if reward else None,
        "reward_components": dict(reward.components) if reward else {},
        "reward_error": reward.error if reward else None,
        "excluded": sample.exclusion,
        "token_ids": sample.token_ids[start:].tolist(),
    }
    for name, values in sorted(sample.token_data.items()):
        if _is_recorded(name, values):
            record[name] = [round(float(x), 5) for x in values[start:]]
    record["ground_truth"] = (
        record["ground_truth"] if _is_plain(record["ground_truth"]) else str(record["ground_truth"])
    )
    return record


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _finite(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Replace NaN and infinity, which JSON lacks, by text, so that they remain visible."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def write_text(file: Path, text: str) -> None:
    """Replace a text file atomically. Characters that UTF-8 cannot encode are escaped.

    Raises:
        ChatLearnError: the file was not written; the old one is unchanged.
    """
    try:
        replace_file(file, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise _cannot_write(file, error) from error


def _cannot_write(path: Path, error: OSError | BackendError) -> ChatLearnError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ChatLearnError(
        f"cannot write {path}: {reason}. Free space or permissions on that disk, or choose another "
        "directory with output_dir=..."
    )
