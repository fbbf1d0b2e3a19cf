"""Remembers outcomes in a file, so that a process is started only for what is new or has changed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chatlearn_trial.files import file_facts
from chatlearn_trial.outcome import Outcome

MOST_REMEMBERED = 200


class Memory:
    """Outcomes by a key that the caller makes of all that they depend on besides imported files.

    A file that is damaged or cannot be written is no error: tasks are then tried again.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def recall(self) -> dict[str, Outcome]:
        """The outcomes whose time is not over and whose files are unchanged."""
        now = time.time()
        found = {}
        for key, entry in self._content().items():
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                files = {name: (int(changed), int(size)) for name, (changed, size) in entry.pop("files").items()}
                patched, changed = (tuple(map(str, entry.pop(name))) for name in ("patched", "changed"))
                outcome = Outcome(**entry, files=files, patched=patched, changed=changed)
                if (outcome.until is None or now < outcome.until) and file_facts(files) == files:
                    found[key] = outcome
        return found

    def keep(self, outcomes: Mapping[str, Outcome]) -> None:
        """Add outcomes; the oldest are dropped."""
        if self.file is None or not outcomes:
            return
        kept = {key: entry for key, entry in self._content().items() if key not in outcomes}
        kept |= {key: asdict(outcome) for key, outcome in outcomes.items()}
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            aside = self.file.with_name(f"{self.file.name}.{os.getpid()}")
            aside.write_text(json.dumps(dict(list(kept.items())[-MOST_REMEMBERED:])), encoding="utf-8")
            aside.replace(self.file)

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.file.read_text(encoding="utf-8")) if self.file is not None else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}
