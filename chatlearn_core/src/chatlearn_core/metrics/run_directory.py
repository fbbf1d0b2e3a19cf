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

from chatlearn_core.exceptions import BackendError, ChatLearnError, TrainerLostError
from chatlearn_core.metrics.timers import Timers
from chatlearn_core.types import Sample


class RunDirectory:
    """Files of one run: ``config.yaml``, ``metrics.jsonl``, ``rollouts/``, ``checkpoints/``, ``summary.json``,
    ``flow.svg``, ``events.jsonl``, ``trace.jsonl``.

    Raises:
        ChatLearnError: the directory cannot be made or written to; names the path and the cause.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            for directory in (path, path / "rollouts", path / "checkpoints"):
                directory.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.write_text("")
            probe.unlink()
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
        """A directory to fill, which becomes ``model`` when the block ends: whoever finds a model finds all of it.

        Raises:
            ChatLearnError: the disk does not take it; an earlier model is untouched.
        """
        aside = self.path / ".writing_model"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            yield aside
            if self.model.exists():
                shutil.rmtree(self.model)
            aside.rename(self.model)
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
        """All whole lines of ``metrics.jsonl``; a line cut short by a kill is left out."""
        return [record for record, _ in _whole_lines(self.metrics_file)]

    def read_summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty before the run ended for the first time."""
        file = self.path / "summary.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}

    def rewind(self, step: int) -> None:
        """Forget what was written after ``step``: a resumed run writes it again."""
        for file in (self.metrics_file, self.trace_file):
            kept = [text for record, text in _whole_lines(file) if record["step"] <= step]
            self._replace(file, "".join(kept))
        for file in (self.path / "rollouts").glob("*_*.jsonl"):
            if int(file.stem.rpartition("_")[2]) > step:
                file.unlink()

    def write_rollouts(self, step: int, samples: Iterable[Sample], kind: str = "step") -> None:
        """Write ``rollouts/{kind}_N.jsonl``: one line a sample, with what the report's browser shows.

        Args:
            step: the step whose weights sampled them.
            samples: in the order of the prompts.
            kind: ``step`` for training rollouts, ``eval`` for those of an evaluation.
        """
        text = "".join(json.dumps(rollout_record(step, sample), ensure_ascii=False) + "\n" for sample in samples)
        self._replace(self.path / "rollouts" / f"{kind}_{step:06d}.jsonl", text)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file at once or not at all."""
        self._replace(self.path / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file at once or not at all."""
        self._replace(self.path / name, text)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from error

    def _append(self, file: Path, *records: Mapping[str, Any]) -> None:
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        except OSError as error:
            raise _cannot_write(file, error) from error

    def _replace(self, file: Path, text: str) -> None:
        temporary = file.with_name(f".{file.name}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            raise _cannot_write(file, error) from error


def rollout_record(step: int, sample: Sample) -> dict[str, Any]:
    """One line of a rollouts file. Per-token lists cover the completion only."""
    start = sample.num_prompt_tokens
    completion = sample.completion
    reward = sample.reward
    record: dict[str, Any] = {
        "step": step,
        "id": sample.id,
        "group": sample.group_id,
        "data_source": sample.prompt.data_source,
        "prompt": sample.prompt.text,
        "ground_truth": sample.prompt.ground_truth,
        "completion": completion.text if completion else None,
        "finish_reason": completion.finish_reason if completion else None,
        "reward": reward.value if reward else None,
        "reward_components": dict(reward.components) if reward else {},
        "reward_error": reward.error if reward else None,
        "excluded": sample.exclusion,
        "token_ids": sample.token_ids[start:].tolist(),
    }
    for name in (
        "generator_logprobs",
        "generator_raw_logprobs",
        "trainer_logprobs",
        "reference_logprobs",
        "advantages",
    ):
        if name in sample.token_data:
            record[name] = [round(float(x), 5) for x in sample.token_data[name][start:]]
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


def _whole_lines(file: Path) -> list[tuple[dict[str, Any], str]]:
    if not file.exists():
        return []
    lines: list[tuple[dict[str, Any], str]] = []
    for text in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            lines.append((json.loads(text), text))
    return lines


def _cannot_write(path: Path, error: OSError | BackendError) -> ChatLearnError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ChatLearnError(
        f"cannot write {path}: {reason}. Free space or permissions on that disk, or choose another "
        "directory with output_dir=..."
    )
