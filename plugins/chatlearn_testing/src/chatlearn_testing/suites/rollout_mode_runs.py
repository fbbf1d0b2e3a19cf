"""Short whole runs in this process on the fakes: a bigram model that samples a token in each turn of the event loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import Assembly, assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_testing.fakes.bigram import TRANSITION, UNIGRAM, read_bigram_tensors
from chatlearn_testing.fakes.records import BIGRAM_FAMILY, FAKE_GENERATOR, FAKE_REWARD, FAKE_TRAINER

STEPS = 6
PROMPTS_PER_STEP = 3
GROUP_SIZE = 2
TIMED = ("timing_s/", "perf/throughput", "perf/replica_idle", "sync/slowest")
"""Metrics that depend on time."""
SLOW = "roles.generator.options.seconds_per_token=0.001"
"""Slow enough that every weight sync finds unfinished completions."""


def with_fakes(registry: PluginRegistry, *records: PluginRecord) -> PluginRegistry:
    """Add the fakes, and further records that no plugin registers."""
    known = {(entry.kind, entry.name) for entry in registry.entries}
    entries = [
        PluginEntry(name=r.name, kind=r.kind, distribution="fakes", version="1", status="ok", record=r)
        for r in (FAKE_TRAINER, FAKE_GENERATOR, FAKE_REWARD, BIGRAM_FAMILY, *records)
        if (r.kind, r.name) not in known
    ]
    return replace(registry, entries=(*registry.entries, *entries))


@dataclass
class ModeRuns:
    """Makes runs of one configuration, each in a directory of its name.

    Args:
        folder: where the directories are.
        model: a bigram model.
        registry: with the fakes.
    """

    folder: Path
    model: Path
    registry: PluginRegistry
    content: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        letters = "abcdefghijklmnopqrst"
        rows = [{"prompt": letters[i : i + 3], "answer": "a"} for i in range(16)]
        data = self.folder / "letters.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.content = {
            "name": "test",
            "model": {"path": str(self.model)},
            "data": {"train": [{"path": str(data), "format": "prompt"}]},
            "algorithm": {
                "name": "grpo",
                "options": {"group_size": GROUP_SIZE, "importance_correction": "truncate", "importance_threshold": 5.0},
            },
            "roles": {
                "trainer": {"kind": "trainer", "backend": "fake"},
                "generator": {"kind": "generator", "backend": "fake", "replicas": 2},
                "reward": {"kind": "reward", "backend": "fake"},
            },
            "sampling": {"max_tokens": 24},
            "train": {"steps": STEPS, "prompts_per_step": PROMPTS_PER_STEP, "mini_batches": 2},
            "checkpoint": {"every": 1, "keep_last": 99},
            "runtime": {"options": {"num_threads": 1}},
        }

    def assemble(self, name: str, rollout: Mapping[str, Any], *overrides: str) -> Assembly:
        """The parts of a run; ``overrides`` as on the command line."""
        content = {**self.content, "output_dir": str(self.folder / name), "rollout": dict(rollout)}
        return assemble(load_config(json.dumps(content, indent=1), overrides, self.registry), self.registry)

    def make(self, name: str, rollout: Mapping[str, Any], *overrides: str) -> Run:
        """A run that is not started yet."""
        return Run(self.assemble(name, rollout, *overrides), observers=self.registry.observers)

    def result(self, name: str) -> dict[str, Any]:
        """What a run leaves that does not depend on time."""
        run_dir = self.folder / name
        return {
            "model": (run_dir / "model" / "model.safetensors").read_bytes(),
            "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in self.metrics(name)],
            "rollouts": {file.name: file.read_text("utf-8") for file in sorted((run_dir / "rollouts").glob("*"))},
            "totals": json.loads((run_dir / "summary.json").read_text("utf-8"))["totals"],
        }

    def metrics(self, name: str) -> list[dict[str, float]]:
        """Every metric of each step."""
        text = (self.folder / name / "metrics.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def trained(self, name: str) -> list[list[str]]:
        """The ids of the samples that each step took, in order."""
        files = sorted((self.folder / name / "rollouts").glob("step*"))
        return [[json.loads(line)["id"] for line in file.read_text("utf-8").splitlines()] for file in files]

    def weights(self, name: str, version: int) -> tuple[Tensor, Tensor]:
        """The transition matrix [V, V] and the bias [V] of a policy version, from the model or a checkpoint."""
        file = self.folder / name / "checkpoints" / f"step_{version:08d}" / "roles" / "trainer" / "weights.safetensors"
        tensors = load_file(file) if version else read_bigram_tensors(self.model)
        return tensors[TRANSITION], tensors[UNIGRAM]
