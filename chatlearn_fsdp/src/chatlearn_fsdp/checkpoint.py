"""Resumable checkpoints of one trainer.

A single rank writes ``weights.safetensors`` and ``optimizer.pt`` (optimizer state by parameter name, random state).
Several ranks write their shards with torch's distributed checkpoint under ``shards/`` and their random states next to
it. Any number of ranks can read either form. ``trainer.json`` is written last and states the form, so a checkpoint
without it is incomplete. With adapters the checkpoint contains only what training changes: the adapters, and a value or
reward head.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.types import FileFacts
from chatlearn_fsdp.sharded_reader import ShardedReader, TensorPlanner
from chatlearn_fsdp.sharding import RankGroup, copy_whole
from chatlearn_hf.checkpoint_names import CheckpointLayout
from chatlearn_hf.lora import adapter_state
from chatlearn_trainer_kit.checkpoint_files import (
    TRAINER_FILE,
    random_file,
    random_state,
    read_pickle,
    read_record,
    set_random_state,
    unreadable,
    write_record,
)
from chatlearn_trainer_kit.optimizer import allocate_state, optimizer_tensors
from chatlearn_trainer_kit.options import LoraOptions

FORMAT = 1
WEIGHTS_FILE, OPTIMIZER_FILE, SHARDS = "weights.safetensors", "optimizer.pt", "shards"


@dataclass(slots=True)
class TrainerState:
    """State to save and load; ``load`` writes into the live tensors and sets ``updates``."""

    model: PreTrainedModel
    layout: CheckpointLayout
    optimizer: torch.optim.Optimizer | None
    head: str
    updates: int
    device: torch.device
    ranks: RankGroup | None
    rank: int
    lora: LoraOptions | None = None

    def weights(self) -> dict[str, Tensor]:
        """Live tensors by the model's own names, tied ones once; with adapters only the tensors that
        training changes.
        """
        if self.lora is not None:
            return {name: tensor.detach() for name, tensor in adapter_state(self.model).items()}
        state = self.model.state_dict()
        return {entry.key: state[entry.key].detach() for entry in self.layout.tensors}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Live optimizer state by parameter name."""
        return optimizer_tensors(self.optimizer, self.model) if self.optimizer is not None else {}

    def identity(self) -> dict[str, Any]:
        """Values that must agree between a checkpoint and the trainer that loads it."""
        return {
            "format": FORMAT,
            "architecture": self.model.config.model_type,
            "head": self.head,
            "parameters": sum(torch.Size(entry.shape).numel() for entry in self.layout.tensors),
            "lora": self.lora.model_dump(mode="json", include={"rank", "alpha", "target_modules"})
            if self.lora
            else None,
        }


def save(directory: Path, state: TrainerState) -> dict[str, FileFacts]:
    """Write a checkpoint and return the facts of this rank's files. Collective. The caller replaces older
    checkpoints.
    """
    directory.mkdir(parents=True, exist_ok=True)
    record, random = _record(state), random_state(state.device)
    if state.ranks is None:
        return write_single(directory, _single_content(state), random, record)
    save_sharded(_sharded_content(state, with_optimizer=state.updates > 0), checkpoint_id=directory / SHARDS)
    return complete_sharded(directory, state.rank, random, record, state.ranks.barrier)


def write_single(
    directory: Path, content: Mapping[str, Any], random: Mapping[str, Tensor], record: Mapping[str, Any]
) -> dict[str, FileFacts]:
    """Write what ``_single_content`` returned, and ``trainer.json``; returns the facts of the files."""
    save_file(content["model"], directory / WEIGHTS_FILE)
    torch.save({"optimizer": content["optimizer"], "random": random}, directory / OPTIMIZER_FILE)
    write_record(directory, record)
    return file_facts(directory, [WEIGHTS_FILE, OPTIMIZER_FILE, TRAINER_FILE])


def complete_sharded(
    directory: Path, rank: int, random: Mapping[str, Tensor], record: Mapping[str, Any], barrier: Callable[[], None]
) -> dict[str, FileFacts]:
    """Write what belongs to a sharded checkpoint besides its shards; returns the facts of this rank's files."""
    torch.save(random, directory / random_file(rank))
    barrier()
    if rank == 0:
        write_record(directory, record)
    # torch names the files of a sharded checkpoint after the rank.
    shards = [f"{SHARDS}/{path.name}" for path in (directory / SHARDS).glob(f"__{rank}_*.distcp")]
    first = [f"{SHARDS}/.metadata", TRAINER_FILE] if rank == 0 else []
    facts = file_facts(directory, [*shards, random_file(rank), *first])
    barrier()
    return facts


def _record(state: TrainerState) -> dict[str, Any]:
    return state.identity() | {
        "updates": state.updates,
        "trainable": state.optimizer is not None,
        "world_size": state.ranks.size if state.ranks is not None else 1,
        "sharded": state.ranks is not None,
    }


def _single_content(state: TrainerState) -> dict[str, Any]:
    moments = state.moments().items()
    return {
        "model": {name: _whole(tensor).contiguous() for name, tensor in state.weights().items()},
        "optimizer": {name: {key: _whole(tensor) for key, tensor in entry.items()} for name, entry in moments},
    }


class BackgroundWriter:
    """Writes copies of a trainer's state to disk in a thread, at most one checkpoint at a time."""

    def __init__(self, ranks: RankGroup | None) -> None:
        """Create the writer; collective over several ranks, whose threads need a process group of their own."""
        self._group: dist.ProcessGroup | None = None
        if ranks is not None:
            self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[dict[str, FileFacts]] | None = None
        """The checkpoint begun last, also after it was written."""

    def wait(self) -> None:
        """Wait until nothing is written any more; ``finish`` raises what the writer raised."""
        if self._last is not None:
            wait([self._last])

    def begin(self, directory: Path, state: TrainerState) -> None:
        """Copy the state to host memory, and begin to write it. Collective."""
        self.wait()
        directory.mkdir(parents=True, exist_ok=True)
        rank, record, random = state.rank, _record(state), random_state(state.device)
        if state.ranks is None:
            copy = tree_map(_copy, _single_content(state))
            self._last = self._thread.submit(write_single, directory, copy, random, record)
            return
        content = _sharded_content(state, with_optimizer=state.updates > 0)
        written = async_save(content, checkpoint_id=directory / SHARDS, process_group=self._group)
        assert isinstance(written, Future)

        def complete() -> dict[str, FileFacts]:
            written.result()
            return complete_sharded(directory, rank, random, record, partial(dist.barrier, self._group))

        self._last = self._thread.submit(complete)

    def finish(self) -> dict[str, FileFacts]:
        """Wait until everything is written; returns the facts of this rank's files. Raises what the writer
        raised.
        """
        assert self._last is not None, "begin comes first"
        return self._last.result()

    def close(self) -> None:
        """Wait for the thread, and leave the process group."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor; ``cpu_offload`` shards tensors even on a single rank, which holds all of them."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load(directory: Path, state: TrainerState) -> None:
    """Read a checkpoint into the live tensors. Collective.

    The random state is restored if this rank saved one (same number of ranks); otherwise it stays.

    Raises:
        CheckpointError: a file is missing, truncated, or of another model.
    """
    record = read_record(directory, state.identity())
    state.updates = int(record["updates"])
    has_moments = bool(record["trainable"]) and state.updates > 0
    if state.optimizer is not None:
        state.optimizer.state.clear()
        if has_moments:
            allocate_state(state.optimizer, state.model.parameters())
    if record["sharded"]:
        _load_sharded(directory, state, has_moments)
    else:
        _load_single(directory, state, has_moments)


def _load_single(directory: Path, state: TrainerState, has_moments: bool) -> None:
    file = directory / WEIGHTS_FILE
    try:
        saved = load_file(file)
    except (SafetensorError, OSError) as error:
        raise unreadable(file, error) from error
    _copy_all(saved, state.weights(), file)
    file = directory / OPTIMIZER_FILE
    content = read_pickle(file)
    if not all(isinstance(content.get(part), dict) for part in ("optimizer", "random")):
        raise unreadable(file, ValueError("it lacks optimizer state or random state"))
    if state.optimizer is not None and has_moments:
        live = state.moments()
        if content["optimizer"].keys() != live.keys():
            raise CheckpointError(
                f"{file} holds optimizer state of other parameters than this model trains:"
                f" {_only_in_one(content['optimizer'], live)}"
            )
        for name, entry in content["optimizer"].items():
            _copy_all(entry, live[name], file)
    if state.ranks is None:
        set_random_state(content["random"], state.device, file)


def _load_sharded(directory: Path, state: TrainerState, has_moments: bool) -> None:
    content = _sharded_content(state, with_optimizer=has_moments and state.optimizer is not None)
    shards = directory / SHARDS
    try:
        with warnings.catch_warnings():  # a single process may read the shards of several
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_sharded(
                content, storage_reader=ShardedReader(shards), planner=TensorPlanner(), no_dist=state.ranks is None
            )
    except CheckpointException as error:
        raise unreadable(shards, error) from error
    except (OSError, pickle.UnpicklingError) as error:
        raise unreadable(shards, error) from error
    file = directory / random_file(state.rank)
    if file.exists():
        set_random_state(read_pickle(file), state.device, file)


def _sharded_content(state: TrainerState, *, with_optimizer: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"model": state.weights()}
    if with_optimizer and state.optimizer is not None:
        content["optimizer"] = state.moments()
    return content


def _copy_all(saved: Mapping[str, Tensor], live: Mapping[str, Tensor], file: Path) -> None:
    if saved.keys() != live.keys():
        raise CheckpointError(f"{file} is of another model: {_only_in_one(saved, live)}")
    for name, tensor in live.items():
        source = saved[name]
        if source.shape != tensor.shape:
            raise CheckpointError(
                f"{file} is of another model: {name} has shape {list(source.shape)}, but this model has"
                f" {list(tensor.shape)}"
            )
        copy_whole(source, tensor)


def _only_in_one(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """Name up to four entries that only the checkpoint has, and up to four that only the model has."""
    only = {"checkpoint": saved.keys() - live.keys(), "model": live.keys() - saved.keys()}
    return "; ".join(f"only the {where} has {', '.join(sorted(names)[:4])}" for where, names in only.items() if names)
