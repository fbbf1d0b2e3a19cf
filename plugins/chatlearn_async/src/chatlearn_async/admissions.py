"""``admissions.jsonl``: which policy versions sampled the tokens of each request.

Groups are drawn, and trained on, in an order that does not depend on timing. What does depend on it is the token from
which a completion goes on under new weights, at whatever moment of a weight sync its replica loads them. With these
tokens recorded, a run can be repeated exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.rollouts.pending import Progress
from chatlearn_core.types import VersionSpan

FILE = "admissions.jsonl"

Ends = tuple[tuple[int, int], ...]
"""(version, stop) of each version that sampled a request's tokens: the number of tokens up to its last."""


class AdmissionLog:
    """Writes the file of a run: a line for each request that ended, and for each step when its weight sync began.

    A request that is made again, because the run resumed, has another line; the last one counts.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE

    def restart(self, step: int) -> None:
        """Go on after the weight sync of a step, with which the run's checkpoint was written; 0: from the start."""
        if not self._file.exists():
            return
        kept: list[str] = []
        lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if line.startswith(f'{{"step": {step},'):
                kept = lines[:number]
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._file)

    def ended(self, sample_id: str, request_id: str, spans: Iterable[VersionSpan]) -> None:
        """A request of a sample ended; of a failed one, nothing was sampled."""
        ends = [[span.version, span.stop] for span in spans]
        self._write({"sample": sample_id, "request": request_id, "ends": ends})

    def synced(self, step: int, version: int, in_flight: Sequence[str]) -> None:
        """The weight sync of a step begins: the version of the weights so far, and the samples whose rollouts it found
        unfinished.
        """
        self._write({"step": step, "version": version, "unfinished": list(in_flight)})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


class Replay:
    """The recorded versions of a run's tokens.

    Args:
        path: its ``admissions.jsonl``.

    Raises:
        ConfigError: the file cannot be read, or a line is not one that ``AdmissionLog`` writes; names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._syncs: dict[int, tuple[int, frozenset[str]]] = {}
        """Step -> the version before its weight sync, and the samples that the sync found unfinished."""
        self._made: dict[str, dict[str, Ends]] = {}
        """Sample id -> request id -> the versions of its tokens."""
        self._crossing: tuple[int, frozenset[str]] = (-1, frozenset())
        """A step, and the samples that have tokens of versions before and behind its weight sync."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"rollout.options.replay names {path}, which cannot be read: {error}. Name the {FILE} of a run"
            ) from error
        for number, line in enumerate(lines, start=1):
            try:
                self._read(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{path}:{number} (rollout.options.replay) is no record of a request or a weight sync: "
                    f"{line[:80]!r}. Name the {FILE} of a run"
                ) from None

    def _read(self, line: Any) -> None:
        if "step" in line:
            unfinished = line["unfinished"]
            if not isinstance(unfinished, list):
                raise TypeError("not a list of samples")
            self._syncs[int(line["step"])] = int(line["version"]), frozenset(map(str, unfinished))
        else:
            ends = tuple((int(version), int(stop)) for version, stop in line["ends"])
            self._made.setdefault(str(line["sample"]), {})[str(line["request"])] = ends

    def cut(self, step: int, sample_id: str, request_id: str) -> int | None:
        """The tokens that a sample's request had before the weights that the sync of ``step`` brought; None if these
        were all, or the request is not recorded.
        """
        version, unfinished = self._sync(step)
        ends = self._made.get(sample_id, {}).get(request_id)
        return None if ends is None or sample_id not in unfinished else _cut(ends, version)

    def behind(self, step: int, in_flight: Sequence[str], made: Mapping[str, Mapping[str, Progress]]) -> list[str]:
        """Samples that are not as far as they were at the weight sync of ``step``.

        Args:
            step: whose weight sync is next.
            in_flight: ids of the samples whose rollouts are unfinished.
            made: sample id -> request id -> how far it is.

        Raises:
            ConfigError: one of them is finished, so the record is of another run.
        """
        version, unfinished = self._sync(step)
        if self._crossing[0] != step:
            crossing = (name for name in unfinished if _crosses(self._made.get(name, {}).values(), version))
            self._crossing = step, frozenset(crossing)
        if unknown := sorted(self._crossing[1] - set(in_flight)):
            raise ConfigError(
                f"{self.path} (rollout.options.replay) has sample {unknown[0]!r} unfinished at the weight sync of step "
                f"{step}, but this run has no such sample in flight. It belongs to a run with other data or settings"
            )
        return [sample_id for sample_id in in_flight if not self._is_there(sample_id, version, made)]

    def _is_there(self, sample_id: str, version: int, made: Mapping[str, Mapping[str, Progress]]) -> bool:
        if sample_id not in self._made:
            return False  # it ended without a request, or never
        reached = made.get(sample_id, {})
        return all(_is_at(reached.get(name), _cut(ends, version)) for name, ends in self._made[sample_id].items())

    def _sync(self, step: int) -> tuple[int, frozenset[str]]:
        if step not in self._syncs:
            if self._syncs and step < min(self._syncs):
                raise ConfigError(
                    f"{self.path} (rollout.options.replay) begins with the weight sync of step {min(self._syncs)}: "
                    "the recorded run resumed from a checkpoint without a record. Remove replay"
                )
            raise ConfigError(
                f"{self.path} (rollout.options.replay) ends before the weight sync of step {step}: this run is longer "
                "than the recorded one. Lower train.steps, or remove replay"
            )
        return self._syncs[step]


def _cut(ends: Ends, version: int) -> int | None:
    """The tokens that are of this version or an older one; None if all are."""
    older = max((stop for of_version, stop in ends if of_version <= version), default=0)
    return None if not ends or older == ends[-1][1] else older


def _crosses(requests: Iterable[Ends], version: int) -> bool:
    """Whether a sample had tokens of this version or an older one, and got others."""
    versions = [of_version for ends in requests for of_version, _ in ends]
    return bool(versions) and min(versions) <= version < max(versions)


def _is_at(progress: Progress | None, cut: int | None) -> bool:
    """Whether a request is as far as its recorded cut."""
    if cut == 0:
        return True
    if progress is None:
        return False
    return progress.ended if cut is None else progress.num_tokens >= cut
