"""Reads a run directory in any state, without changing it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from chatlearn_core.exceptions import ChatLearnError

_LONGEST_INT = 18
"""Longest whole number in digits; it fits into 64 bits."""
RolloutKind = Literal["step", "eval"]
_ROLLOUT_FILE = re.compile(r"(step|eval)_(\d+)\.jsonl")


@dataclass(slots=True, frozen=True)
class RolloutFile:
    """``rollouts/{kind}_{step}.jsonl``."""

    path: Path
    kind: RolloutKind
    step: int


@dataclass(slots=True)
class RunFiles:
    """Contents of a run's files. Missing files are empty; unreadable ones are reported in ``notes``."""

    path: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """One record per step, in order of steps; NaN and infinity are text."""
    events: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    """Lines of ``timeline.jsonl``, which chatlearn-async writes."""
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    flow_svg: str = ""
    rollout_files: list[RolloutFile] = field(default_factory=list)
    """Sorted by step."""
    notes: list[str] = field(default_factory=list)


def read_run(path: Path) -> RunFiles:
    """Read everything except the rollouts, which may be large.

    Raises:
        ChatLearnError: the directory does not exist or belongs to no run; names runs in its subdirectories, if any.
    """
    if not path.is_dir():
        raise ChatLearnError(f"directory {path} does not exist. Give the output_dir of a run")
    if not _is_run(path):
        raise ChatLearnError(_not_a_run(path))
    files = RunFiles(path)
    by_step = {}
    for record in read_lines(path / "metrics.jsonl", files.notes):
        step = record.get("step")
        if isinstance(step, int):
            by_step[step] = record  # a step written again replaces the earlier one
        else:
            files.notes.append(f"metrics.jsonl: a line without a whole number under 'step' is left out: {record!r:.80}")
    files.metrics = [by_step[step] for step in sorted(by_step)]
    files.events = list(read_lines(path / "events.jsonl", files.notes))
    files.timeline = list(read_lines(path / "timeline.jsonl", files.notes))
    files.summary = _mapping(path / "summary.json", _parse_json, files.notes)
    files.config = _mapping(path / "config.yaml", yaml.safe_load, files.notes)
    files.config_text = _text(path / "config.yaml", files.notes)
    files.flow_svg = _text(path / "flow.svg", files.notes)
    found = [(file, _ROLLOUT_FILE.fullmatch(file.name)) for file in (path / "rollouts").glob("*.jsonl")]
    files.rollout_files = sorted(
        (RolloutFile(file, "eval" if match[1] == "eval" else "step", int(match[2])) for file, match in found if match),
        key=lambda file: (file.step, file.kind),
    )
    return files


def read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line; an unreadable line is skipped and reported in ``notes``.

    A last line without a newline is being written, or was truncated by a kill.
    """
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    record = _parse_json(line)
                except (ValueError, RecursionError) as error:
                    reason = "is incomplete" if not line.endswith("\n") else f"cannot be read ({error})"
                    notes.append(f"{path.name}, line {number} {reason} and is left out")
                    continue
                if isinstance(record, dict):
                    yield record
                else:
                    notes.append(f"{path.name}, line {number} is not a JSON object and is left out")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")


def _parse_json(text: str) -> Any:
    """Parse JSON; numbers that are not finite, and whole numbers beyond 64 bits, become text."""
    return json.loads(text, parse_constant=str, parse_float=_finite_or_text, parse_int=_int_or_text)


def _int_or_text(text: str) -> int | str:
    """Return a number, or text if it is too long, because float arithmetic fails on very long whole numbers."""
    return int(text) if len(text) <= _LONGEST_INT else text


def _finite_or_text(text: str) -> float | str:
    """Return a number, or text for infinity (1e999), which JSON in the page may not contain."""
    value = float(text)
    return value if math.isfinite(value) else text


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()


def _not_a_run(path: Path) -> str:
    below = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_run(child))
    runs = f" Runs below it: {', '.join(below[:10])}." if below else ""
    return (
        f"{path} is not the directory of a run: it has neither config.yaml nor metrics.jsonl.{runs} "
        "Give the output_dir of a run"
    )


def _text(path: Path, notes: list[str]) -> str:
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
        return ""


def _mapping(path: Path, parse: Any, notes: list[str]) -> dict[str, Any]:
    text = _text(path, notes)
    if not text:
        return {}
    try:
        content = parse(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if isinstance(content, dict):
        return content
    notes.append(f"{path.name} contains a {type(content).__name__}, not a mapping, and is left out")
    return {}
