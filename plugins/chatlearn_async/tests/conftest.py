"""Whole runs in this process on the fakes: a bigram model that samples a token in each turn of the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import Assembly, assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.fakes.records import BIGRAM_FAMILY, FAKE_GENERATOR, FAKE_REWARD, FAKE_TRAINER

TIMED = ("timing_s/", "perf/throughput", "perf/replica_idle", "sync/slowest_replica_s")


def _entry(record: PluginRecord) -> PluginEntry:
    return PluginEntry(
        name=record.name, kind=record.kind, distribution="fakes", version="1", status="ok", record=record
    )


@pytest.fixture(scope="session")
def registry() -> PluginRegistry:
    """Everything installed, and the fakes."""
    found = discover_plugins()
    unreliable = replace(FAKE_GENERATOR, name="fake_forgetful", resumable=False, kv_after_sync="dropped")
    keeping = replace(FAKE_GENERATOR, name="fake_keeping", resumable=False, kv_after_sync="kept")
    records = (FAKE_TRAINER, FAKE_GENERATOR, unreliable, keeping, FAKE_REWARD, BIGRAM_FAMILY)
    return replace(found, entries=(*found.entries, *map(_entry, records)))


@pytest.fixture(scope="session")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bigram_model(tmp_path_factory.mktemp("bigram"))


@dataclass
class AsyncRuns:
    """Makes runs of one configuration, each in a directory of its name."""

    folder: Path
    model: Path
    registry: PluginRegistry
    content: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        letters = "abcdefghijklmnopqrst"
        rows = [{"prompt": letters[i : i + 3], "answer": "a"} for i in range(16)]
        data = self.folder / "letters.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.content = {
            "name": "test",
            "model": {"path": str(self.model)},
            "data": {"train": [{"path": str(data), "format": "prompt"}]},
            "algorithm": {
                "name": "grpo",
                "options": {"group_size": 2, "importance_correction": "truncate", "importance_threshold": 5.0},
            },
            "roles": {
                "trainer": {"kind": "trainer", "backend": "fake"},
                "generator": {"kind": "generator", "backend": "fake", "replicas": 2},
                "reward": {"kind": "reward", "backend": "fake"},
            },
            "sampling": {"max_tokens": 24},
            "train": {"steps": 6, "prompts_per_step": 3, "mini_batches": 2},
            "checkpoint": {"every": 1, "keep_last": 99},
            "runtime": {"options": {"num_threads": 1}},
        }

    def assemble(self, name: str, rollout: Mapping[str, Any], *overrides: str) -> Assembly:
        """The parts of a run; ``overrides`` as on the command line."""
        content = {**self.content, "output_dir": str(self.folder / name), "rollout": dict(rollout)}
        return assemble(load_config(yaml.safe_dump(content), overrides, self.registry), self.registry)

    def make(self, name: str, rollout: Mapping[str, Any], *overrides: str) -> Run:
        """A run that is not started yet."""
        return Run(self.assemble(name, rollout, *overrides), observers=self.registry.observers)

    def result(self, name: str) -> dict[str, Any]:
        """What a run leaves that does not depend on time."""
        run_dir = self.folder / name
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return {
            "model": (run_dir / "model" / "model.safetensors").read_bytes(),
            "metrics": [
                {k: v for k, v in line.items() if not k.startswith((*TIMED, "sync/slowest"))} for line in lines
            ],
            "rollouts": {file.name: file.read_text() for file in sorted((run_dir / "rollouts").glob("*"))},
            "totals": json.loads((run_dir / "summary.json").read_text())["totals"],
        }

    def trained(self, name: str) -> list[list[str]]:
        """The ids of the samples that each step took, in order."""
        files = sorted((self.folder / name / "rollouts").glob("step*"))
        return [[json.loads(line)["id"] for line in file.read_text().splitlines()] for file in files]


@pytest.fixture
def runs(tmp_path: Path, bigram: Path, registry: PluginRegistry) -> AsyncRuns:
    return AsyncRuns(tmp_path, bigram, registry)


@pytest.fixture
def completed(runs: AsyncRuns) -> Callable[..., Any]:
    """``await completed(name, rollout, *overrides)``: make a run, and return its result."""

    async def complete(name: str, rollout: Mapping[str, Any], *overrides: str) -> dict[str, Any]:
        summary = await runs.make(name, rollout, *overrides).train()
        assert summary["status"] == "completed"
        return runs.result(name)

    return complete
