"""A run's directory: what is written where, and how a resumed run continues its files."""

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
"""The page about a run that failed. Observers and runtimes write it; a run that goes on removes it."""
_WRITING_MODEL = ".writing_model"
_REPLACED_MODEL = ".replaced_model"


class RunDirectory:
    """Files of one run: ``config.yaml``, ``metrics.jsonl``, ``rollouts/``, ``checkpoints/``, ``summary.json``,
    ``events.jsonl``, ``trace.jsonl``. Observers add theirs.

    Raises:
        ChatLearnError: the directory cannot be made or written to; names the path and the cause.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[Path] = set()
        """Files that may not be on the disk yet, if the machine's power fails."""
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
        """Where the trained model is exported."""
        return self.path / "model"

    @contextmanager
    def replacing_model(self) -> Iterator[Path]:
        """A directory to fill, which becomes ``model`` when the block ends: a model that is there is whole.

        Raises:
            ChatLearnError: the disk does not take it; an earlier model is untouched.
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
            raise  # not the disk's fault: the trainer may be rebuilt, and exports once more
        except (OSError, BackendError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise _cannot_write(self.model, error) from error

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one line to ``metrics.jsonl``: ``{"step": ..., name: value, ...}``."""
        self._append(self.metrics_file, {"step": step, **_finite(metrics)})

    def append_trace(self, step: int, timers: Timers, during: str | None = None) -> None:
        """Add the trace of ``timers`` to ``trace.jsonl``: who did what when.

        Args:
            during: what it was part of, if not of the step itself.
        """
        extra = {} if during is None else {"during": during}
        self._append(self.trace_file, *({"step": step, **entry, **extra} for entry in timers.trace()))

    def append_event(self, event: str, **facts: Any) -> dict[str, Any]:
        """Add one line to ``events.jsonl``: what happened outside the ordinary course of steps, and when (UTC)."""
        record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **facts}
        self._append(self.path / "events.jsonl", record)
        return record

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines of ``metrics.jsonl``; a line cut short by a kill or a full disk is left out.

        Raises:
            ChatLearnError: the file cannot be read.
        """
        return [line.record for line in self._read_steps(self.metrics_file)[0]]

    def read_summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty before the run ended for the first time, or if it is damaged."""
        try:
            content = json.loads((self.path / "summary.json").read_bytes())
        except (OSError, ValueError, RecursionError):  # what it says can be found out again
            return {}
        return content if isinstance(content, dict) else {}

    def rewind(self, step: int) -> list[str]:
        """Forget what was written after ``step``: a resumed run writes it again. Removes broken lines, too.

        Returns:
            a sentence for each file that had broken lines.

        Raises:
            ChatLearnError: the storage does not take it.
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
        except OSError as error:
            raise _cannot_write(self.path / "rollouts", error) from error
        return repaired

    def remove_unfinished(self) -> None:
        """Remove what a process that was killed left half-written: temporary files and an unfinished export.

        Raises:
            ChatLearnError: the storage does not take it.
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
        """Have all that was written on the disk: a checkpoint that survives a power failure goes on from it.

        Raises:
            OSError: the storage does not take it.
        """
        for path in (*self._written, self.path, self.path / "rollouts"):
            make_durable(path)
        self._written.clear()

    def write_rollouts(self, step: int, samples: Iterable[Sample], kind: str = "step") -> None:
        """Write ``rollouts/{kind}_N.jsonl``: one line a sample, with what the report's browser shows.

        Args:
            step: the step whose weights sampled them.
            samples: in the order of the prompts.
            kind: ``step`` for training rollouts, ``eval`` for those of an evaluation.
        """
        content = b"".join(json_line(rollout_record(step, sample)) for sample in samples)
        self._replace(self.path / "rollouts" / f"{kind}_{step:06d}.jsonl", content, durable=False)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file at once or not at all."""
        self._replace(self.path / name, json_line(content, indent=2))

    def write_text(self, name: str, text: str) -> None:
        """See the function ``write_text``."""
        write_text(self.path / name, text)

    def read_text(self, name: str) -> str | None:
        """What ``write_text`` wrote; None where there is no such file."""
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ChatLearnError(f"cannot read {self.path / name}: {error.strerror or error}") from error

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
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
        """Lines of steps, and the numbers of others."""
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
    """One line of a rollouts file, of a sample with plain arrays. Lists have one number for each completion token."""
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
    """JSON has no NaN or infinity: they are written as text, so that they are seen and not lost."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def write_text(file: Path, text: str) -> None:
    """Write a text file at once or not at all. What UTF-8 cannot hold is written as an escape.

    Raises:
        ChatLearnError: it is not written; an earlier one is as it was.
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
