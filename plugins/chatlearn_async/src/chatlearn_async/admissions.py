"""``admissions.jsonl``: which completions each weight sync found unfinished, and how far they were.

Groups are drawn, and trained on, in an order that does not depend on timing. What does depend on it is the token from
which a completion goes on under new weights. With these tokens recorded, a run can be repeated exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.rollouts.pending import Progress

FILE = "admissions.jsonl"

Cuts = Mapping[str, Mapping[str, int | None]]
"""Sample id -> request id -> tokens that it had when it was interrupted; None if it had ended. A request that had no
token is not named."""


class AdmissionLog:
    """Appends to the file of a run.

    A step that is made again, because the run resumed, has another line; the last one counts.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE

    def write(self, step: int, unfinished: Mapping[str, Mapping[str, Progress]]) -> None:
        """The weight sync of a step found these rollouts unfinished, with these requests made."""
        cuts: Cuts = {
            sample_id: {
                name: None if progress.ended else progress.num_tokens
                for name, progress in made.items()
                if progress.ended or progress.num_tokens
            }
            for sample_id, made in unfinished.items()
        }
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, "unfinished": cuts}, ensure_ascii=False) + "\n")


class Replay:
    """The recorded interruptions of a run.

    Args:
        path: its ``admissions.jsonl``.

    Raises:
        ConfigError: the file cannot be read, or a line is not one that ``AdmissionLog`` writes; names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._steps: dict[int, Cuts] = {}
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
                cuts = [cut for made in unfinished.values() for cut in made.values()]
                valid = isinstance(step, int) and all(n is None or (isinstance(n, int) and n >= 0) for n in cuts)
            except (ValueError, KeyError, TypeError, AttributeError):
                valid = False
            if not valid:
                raise ConfigError(
                    f"{path}:{number} (rollout.options.replay) is no record of a weight sync: {line[:80]!r}. Name the "
                    f"{FILE} of a run"
                )
            self._steps[step] = unfinished

    def cut(self, step: int, sample_id: str, request_id: str) -> int | None:
        """The tokens that a sample's request had at the weight sync of ``step``; None if it had ended by then."""
        made = self._of(step).get(sample_id)
        return None if made is None else made.get(request_id, 0)

    def behind(self, step: int, in_flight: Sequence[str], made: Mapping[str, Mapping[str, Progress]]) -> list[str]:
        """Samples that are not as far as they were at the weight sync of ``step``.

        Args:
            step: whose weight sync is next.
            in_flight: ids of the samples whose rollouts are unfinished.
            made: sample id -> request id -> how far it is.

        Raises:
            ConfigError: one of them is finished, so the record is of another run.
        """
        recorded = self._of(step)
        behind = [
            sample_id
            for sample_id, cuts in recorded.items()
            if not all(_is_at(made.get(sample_id, {}).get(name), cut) for name, cut in cuts.items())
        ]
        if unknown := sorted(set(behind) - set(in_flight)):
            raise ConfigError(
                f"{self.path} (rollout.options.replay) has sample {unknown[0]!r} unfinished at the weight sync of step "
                f"{step}, but this run has no such sample in flight. It belongs to a run with other data or settings"
            )
        return behind + [sample_id for sample_id in in_flight if sample_id not in recorded]

    def _of(self, step: int) -> Cuts:
        if step not in self._steps:
            raise ConfigError(
                f"{self.path} (rollout.options.replay) ends before the weight sync of step {step}: this run is longer "
                "than the recorded one. Lower train.steps, or remove replay"
            )
        return self._steps[step]


def _is_at(progress: Progress | None, cut: int | None) -> bool:
    """Whether a request is as far as its recorded cut."""
    if progress is None:
        return False
    return progress.ended if cut is None else progress.num_tokens >= cut
