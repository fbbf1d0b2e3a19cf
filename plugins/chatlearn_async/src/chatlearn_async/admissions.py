"""``admissions.jsonl``: which completions each weight sync found unfinished, and how far they were.

Groups are drawn, and trained on, in an order that does not depend on timing. What does depend on it is the token from
which a completion goes on under new weights. With these tokens recorded, a run can be repeated exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from chatlearn_core.exceptions import ConfigError

FILE = "admissions.jsonl"

Cuts = Mapping[str, int]
"""Sample id -> tokens that it had when it was interrupted; 0 if it had not begun."""


class AdmissionLog:
    """Appends to the file of a run.

    A step that is made again, because the run resumed, has another line; the last one counts.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE

    def write(self, step: int, cuts: Cuts) -> None:
        """The weight sync of a step found these completions unfinished."""
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, "unfinished": dict(cuts)}, ensure_ascii=False) + "\n")


class Replay:
    """The recorded interruptions of a run.

    Args:
        path: its ``admissions.jsonl``.

    Raises:
        ConfigError: the file cannot be read, or a line is not one that ``AdmissionLog`` writes; names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._steps: dict[int, dict[str, int]] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"rollout.options.replay names {path}, which cannot be read: {error}. Name the {FILE} of a run"
            ) from error
        for number, line in enumerate(lines, start=1):
            try:
                content = json.loads(line)
                step, unfinished = content["step"], content["unfinished"]
                valid = isinstance(step, int) and all(isinstance(n, int) and n >= 0 for n in unfinished.values())
            except (ValueError, KeyError, TypeError, AttributeError):
                valid = False
            if not valid:
                raise ConfigError(
                    f"{path}:{number} (rollout.options.replay) is no record of a weight sync: {line[:80]!r}. Name the "
                    f"{FILE} of a run"
                )
            self._steps[step] = unfinished

    def cut(self, step: int, sample_id: str) -> int | None:
        """The tokens that the sample had at the weight sync of ``step``; None if it was finished by then."""
        return self._of(step).get(sample_id)

    def check(self, step: int, in_flight: set[str]) -> None:
        """Raises ConfigError if the record is of a run with other samples in flight at this weight sync."""
        if unknown := sorted(self._of(step).keys() - in_flight):
            raise ConfigError(
                f"{self.path} (rollout.options.replay) has sample {unknown[0]!r} unfinished at the weight sync of step "
                f"{step}, but this run has no such sample in flight. It belongs to a run with other data or settings"
            )

    def _of(self, step: int) -> dict[str, int]:
        if step not in self._steps:
            raise ConfigError(
                f"{self.path} (rollout.options.replay) ends before the weight sync of step {step}: this run is longer "
                "than the recorded one. Lower train.steps, or remove replay"
            )
        return self._steps[step]
