"""Whole runs in this process on the fakes: a bigram model that samples a token in each turn of the event loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import Assembly, assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_testing.fakes.records import (
    BIGRAM_FAMILY,
    FAKE_ALGORITHM,
    FAKE_GENERATOR,
    FAKE_REWARD,
    FAKE_SCHEDULE,
    FAKE_TRAINER,
)

TIMED = ("timing_s/", "perf/throughput", "perf/replica_idle", "sync/slowest")
"""Beginnings of the names of metrics that depend on time in every run."""
FAKES = (FAKE_TRAINER, FAKE_GENERATOR, FAKE_REWARD, FAKE_ALGORITHM, FAKE_SCHEDULE, BIGRAM_FAMILY)
LETTERS = "abcdefghijklmnopqrst"


def registry_with(found: PluginRegistry, *records: PluginRecord) -> PluginRegistry:
    """Return a registry with the fakes and these records, in the place of plugins of their kind and name."""
    added = {
        (record.kind, record.name): PluginEntry(
            name=record.name, kind=record.kind, distribution="fakes", version="1", status="ok", record=record
        )
        for record in (*FAKES, *records)
    }
    others = (entry for entry in found.entries if (entry.kind, entry.name) not in added)
    return replace(found, entries=(*others, *added.values()))


@dataclass
class WholeRuns:
    """Makes runs of one configuration, each in a directory of its name below ``folder``."""

    folder: Path
    model: Path
    """A bigram model."""
    registry: PluginRegistry
    content: dict[str, Any] = field(default_factory=dict)
    """The configuration without ``output_dir`` and ``rollout``; what is given replaces whole sections."""

    def __post_init__(self) -> None:
        rows = [{"prompt": LETTERS[i : i + 3], "answer": "a"} for i in range(16)]
        data = self.folder / "letters.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.content = {
            "name": "test",
            "model": {"path": str(self.model)},
            "data": {"train": [{"path": str(data), "format": "prompt"}]},
            "algorithm": {"name": "fake"},
            "roles": {
                "trainer": {"kind": "trainer", "backend": "fake"},
                "generator": {"kind": "generator", "backend": "fake", "replicas": 2},
                "reward": {"kind": "reward", "backend": "fake"},
            },
            "sampling": {"max_tokens": 24},
            "train": {"steps": 6, "prompts_per_step": 3, "mini_batches": 2},
            "checkpoint": {"every": 1, "keep_last": 99},
            "runtime": {"options": {"num_threads": 1}},
            **deepcopy(self.content),  # tests change it
        }

    def assemble(self, name: str, rollout: Mapping[str, Any], *overrides: str) -> Assembly:
        """Build the parts of a run.

        Args:
            rollout: the section of the configuration.
            overrides: as on the command line.
        """
        content = {**self.content, "output_dir": str(self.folder / name), "rollout": dict(rollout)}
        return assemble(load_config(json.dumps(content, indent=1), overrides, self.registry), self.registry)

    def make(self, name: str, rollout: Mapping[str, Any], *overrides: str) -> Run:
        """Build a run without starting it; see ``assemble``."""
        return Run(self.assemble(name, rollout, *overrides), observers=self.registry.observers)

    def result(self, name: str) -> dict[str, Any]:
        """Read what a run leaves that does not depend on time: weights, metrics, samples, totals."""
        run_dir = self.folder / name
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return {
            "model": (run_dir / "model" / "model.safetensors").read_bytes(),
            "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines],
            "rollouts": {file.name: file.read_text(encoding="utf-8") for file in self._rollouts(name, "*")},
            "totals": json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["totals"],
        }

    def trained(self, name: str) -> list[list[str]]:
        """Read the ids of the samples that each step took, in order."""
        files = self._rollouts(name, "step*")
        return [[json.loads(line)["id"] for line in file.read_text(encoding="utf-8").splitlines()] for file in files]

    def _rollouts(self, name: str, pattern: str) -> list[Path]:
        return sorted((self.folder / name / "rollouts").glob(pattern))
