"""Light backends of a distribution of its own, which the tests install for driver and workers alike."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec, RewardSpec, TrainerSpec
from chatlearn_core.types import Completion, Metric, RewardResult, VersionSpan


@hookimpl
def chatlearn_trainers():
    return [TrainerSpec(name="counting", factory=f"{__name__}:CountingTrainer", options=f"{__name__}:TrainerOptions")]


@hookimpl
def chatlearn_generators():
    return [GeneratorSpec(name="echo", factory=f"{__name__}:EchoGenerator", options=f"{__name__}:EchoOptions")]


@hookimpl
def chatlearn_rewards():
    return [RewardSpec(name="where", factory=f"{__name__}:WhereReward", options=f"{__name__}:RewardOptions")]


class TrainerOptions(BaseModel):
    model_parallel: int = 1
    hang_rank: int | None = None
    fail_rank: int | None = None
    refuse: bool = False


class CountingTrainer:
    """Outputs name their token; updates count what they saw. Only the last rank of a model-parallel group answers."""

    def __init__(self, options: TrainerOptions, context) -> None:
        self.options, self.context = options, context
        self.data_parallel_rank = context.rank // options.model_parallel
        self.data_parallel_size = context.world_size // options.model_parallel
        self.speaks = context.rank % options.model_parallel == options.model_parallel - 1

    def setup(self) -> None:
        if self.options.refuse:
            raise ConfigError("the trainer refuses to start. Let it")

    def compute(self, batch, request):
        if not self.speaks:
            return {}
        starts = batch.cu_seqlens[:-1].long()
        outputs = {"logprobs": batch.token_ids.float() * -2, "scores": batch.token_ids[starts].float()}
        return {name: outputs[name] for name in request.names}

    def update(self, batch, loss):
        if self.context.rank == self.options.hang_rank:
            time.sleep(3600)
        if self.context.rank == self.options.fail_rank:
            raise RuntimeError("the optimizer is upset")
        if not self.speaks:
            return {}
        return {
            "sequences": Metric(batch.num_sequences, reducer="sum"),
            "token_ids": Metric(float(batch.token_ids.sum()), reducer="sum"),
            "units": Metric(len(set(batch.unit_index.tolist())), reducer="sum"),
            "loss_called": Metric(float(loss.factor)),
        }

    def save(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"rank{self.context.rank}").write_text(str(os.getpid()))
        return file_facts(directory, [f"rank{self.context.rank}"])

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        """This one has no weights."""

    def load(self, directory: Path) -> None:
        self.loaded = (directory / f"rank{self.context.rank}").read_text()

    def export_model(self, directory: Path) -> None:
        """What this process sees of its node's GPUs."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"rank{self.context.rank}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))

    def offload(self, parts) -> None: ...

    def onload(self, parts) -> None: ...

    def health(self):
        return None

    def close(self) -> None: ...


class EchoOptions(BaseModel):
    delay_s: float = 0.0
    repeat: int = 1
    """How often the prompt's tokens are returned."""
    delay_file: str | None = None
    """The delay counts while this file exists."""
    hang_once: str | None = None
    """A file; while it exists the worker deletes it and does nothing any more."""
    tells: str | None = None
    """An environment variable whose value is the text of every completion."""


class EchoGenerator:
    """Returns what it resumes, then the prompt's tokens; the logprobs are this process's number, negative."""

    policy_version = 3
    state = "serving"

    def __init__(self, options: EchoOptions, context) -> None:
        self.options, self.context = options, context
        self.order: list[str] = []

    def setup(self) -> None: ...

    async def generate(self, request, on_tokens=None):
        self.order.append(request.id)
        if request.resume_from is not None and type(request.resume_from.token_ids) is not np.ndarray:
            raise TypeError(f"an engine is given ordinary arrays, not {request.resume_from.token_ids!r}")
        if request.sampling.max_tokens == 13:
            raise ValueError("thirteen tokens")
        trap = self.options.hang_once
        if trap is not None and Path(trap).exists():
            Path(trap).unlink()
            time.sleep(3600)  # not awaited: the worker's event loop stands still
        while self.options.delay_file is not None and Path(self.options.delay_file).exists():
            await asyncio.sleep(0.05)
        await asyncio.sleep(self.options.delay_s)
        resumed = () if request.resume_from is None else request.resume_from.token_ids
        tokens = np.concatenate([resumed, np.tile(request.prompt_ids, self.options.repeat)]).astype(np.int64)
        return Completion(
            request_id=request.id,
            token_ids=tokens,
            logprobs=np.full(len(tokens), -float(os.getpid()), np.float32),
            basis=request.sampling.basis,
            finish_reason="stop",
            sampling=request.sampling,
            version_spans=(VersionSpan(0, len(tokens), self.policy_version),),
            text=",".join(self.order) if self.options.tells is None else os.environ.get(self.options.tells, "not set"),
        )

    async def abort(self, request_ids=None) -> None:
        self.order += [f"abort {name}" for name in request_ids]

    def offload(self, parts) -> None: ...

    def onload(self, parts) -> None: ...

    def close(self) -> None: ...


class RewardOptions(BaseModel):
    block_s: float = 0.0
    block_on: str = "s1"
    """The sample that blocks."""
    die_on: str | None = None
    """A sample that no process survives."""
    die_once: str | None = None
    """A file; while it exists the worker deletes it and kills itself."""


class WhereReward:
    """The value is the process that judged."""

    def __init__(self, options: RewardOptions, context) -> None:
        self.options = options

    def setup(self) -> None: ...

    async def score(self, samples):
        names = [sample.id for sample in samples]
        if self.options.block_s and self.options.block_on in names:
            time.sleep(self.options.block_s)  # not awaited: the worker's event loop stands still
        if self.options.die_on in names:
            os.kill(os.getpid(), signal.SIGKILL)
        path = self.options.die_once
        if path is not None and Path(path).exists():
            Path(path).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [RewardResult(float(os.getpid()), {"tokens": float(len(s.token_ids))}) for s in samples]

    def offload(self, parts) -> None: ...

    def onload(self, parts) -> None: ...

    def close(self) -> None: ...


class CountingLoss:
    """What travels to the ranks: pickled by name, like any algorithm's."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    unit = "sequence"

    def __call__(self, outputs, batch):
        return torch.zeros(())
