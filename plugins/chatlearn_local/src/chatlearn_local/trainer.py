"""A trainer role of the local runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from chatlearn_core.protocols import (
    BackgroundSavingTrainer,
    Derive,
    Loss,
    MemoryAction,
    MemoryEvent,
    MemoryPart,
    Split,
    Trainer,
)
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import (
    Derived,
    FileFacts,
    Metrics,
    OutputRequest,
    Outputs,
    Payload,
    TrainBatch,
    WeightManifest,
)
from chatlearn_runtime_kit.offload import move
from chatlearn_runtime_kit.saved_files import merged_facts
from chatlearn_runtime_kit.sync_answers import whole_manifest


class LocalTrainer:
    """A trainer role of one rank: its calls run in the role's executor."""

    def __init__(self, name: str, trainer: Trainer, executor: SerialExecutor) -> None:
        self.name = name
        self.trainer = trainer
        self.executor = executor
        self._manifests: dict[Payload, WeightManifest] = {}

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Outputs without gradient."""
        return await self.executor.run("compute", self.trainer.compute, batch, request)

    async def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """One optimizer step."""
        return await self.executor.run("update", self.trainer.update, batch, loss)

    async def derive(self, batch: TrainBatch, function: Derive, split: Split = "group") -> Derived:
        """New data for a batch; the single rank has all of it."""
        return await self.executor.run("derive", function, batch) if batch.num_sequences else Derived()

    async def save(self, directory: Path) -> Mapping[str, FileFacts]:
        """Write a resumable checkpoint; returns the trainer's facts about its files."""
        facts = await self.executor.run("save", self.trainer.save, directory)
        return merged_facts([facts], f"role {self.name!r}")

    async def begin_save(self, directory: Path) -> bool:
        """Copy the state and begin to write it; False if the trainer cannot."""
        if not isinstance(self.trainer, BackgroundSavingTrainer):
            return False
        await self.executor.run("save", self.trainer.begin_save, directory)
        return True

    async def finish_save(self) -> Mapping[str, FileFacts]:
        """Wait until the files are written, beside other calls; returns the trainer's facts about them."""
        assert isinstance(self.trainer, BackgroundSavingTrainer)
        waiting = SerialExecutor(self.executor.name, self.executor.timeout_s)
        try:
            return merged_facts([await waiting.run("save", self.trainer.finish_save)], f"role {self.name!r}")
        finally:
            waiting.stop()

    async def load(self, directory: Path) -> None:
        """Read a checkpoint."""
        await self.executor.run("load", self.trainer.load, directory)

    async def load_model(self, directory: Path, *, decay: float = 0.0) -> None:
        """Load a model directory's weights."""
        self._manifests.clear()
        await self.executor.run("load_model", lambda: self.trainer.load_model(directory, decay=decay))

    async def manifest(self, payload: Payload) -> WeightManifest:
        """The trainer's manifest, requested once."""
        if payload not in self._manifests:
            found = await self.executor.run("manifest", self.trainer.manifest, payload)
            self._manifests[payload] = whole_manifest(found, f"role {self.name!r}")
        return self._manifests[payload]

    async def export_model(self, directory: Path) -> None:
        """Write a Hugging Face model directory."""
        await self.executor.run("export_model", self.trainer.export_model, directory)

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Move parts out of device memory."""
        return await self._move("offload", parts)

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Bring parts back."""
        return await self._move("onload", parts)

    async def _move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        return await self.executor.run(action, lambda: move(self.trainer, action, parts, role=self.name, worker=0))
