"""Resumable checkpoints: Megatron-Core's distributed checkpoint under ``shards/``, random states, ``trainer.json``.

Weights and optimizer state are saved by global names and shapes, so any layout of ranks can read them. With adapters
the checkpoint contains only what training changes: the adapters, and a value or reward head. ``trainer.json`` is
written last, so a checkpoint without it is incomplete.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.types import FileFacts
from chatlearn_megatron import cpu_compatibility
from chatlearn_megatron.model import MegatronModel
from chatlearn_trainer_kit.options import LoraOptions

FORMAT = 1
SHARDS, TRAINER_FILE = "shards", "trainer.json"
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""Form of Megatron-Core's checkpoints that every layout can read."""

_OF_PARAMETERS = frozenset({"optimizer", "state", "param_groups", "param_state", "fp32_from_fp16_params"})
"""Keys of an optimizer's state that differ between its parts."""

_UNREADABLE = (
    AttributeError,
    CheckpointException,
    CheckpointingException,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""What readers raise for missing, truncated or damaged files."""


@dataclass(slots=True)
class TrainerState:
    """State to save and load; ``load`` writes into the live tensors and sets ``updates``."""

    model: MegatronModel
    optimizer: MegatronOptimizer | None
    updates: int
    device: torch.device
    lora: LoraOptions | None = None

    def identity(self) -> dict[str, Any]:
        """Values that must agree between a checkpoint and the trainer that loads it."""
        return {
            "format": FORMAT,
            "architecture": self.model.hf.config.model_type,
            "head": self.model.head,
            "parameters": sum(torch.Size(shape).numel() for shape in self.model.shapes.values()),
            "lora": self.lora.model_dump(mode="json", include={"rank", "alpha", "target_modules"})
            if self.lora
            else None,
        }


class _SaveDirectly(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron-Core is not typed
    """Writes in this process. Megatron-Core's own writer forks processes and keeps one for its queue."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        content, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save_sharded(
            mcore_to_pyt_state_dict(content, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save(directory: Path, state: TrainerState) -> Mapping[str, FileFacts]:
    """Write a checkpoint and return the facts of this rank's files. Collective."""
    ranks, shards = state.model.ranks, directory / SHARDS
    shards.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    with cpu_compatibility.without_cuda_copies(state.device):
        dist_checkpointing.save(
            _content(state, with_optimizer=state.optimizer is not None and state.updates > 0, loading=False),
            str(shards),
            sharded_strategy=_SaveDirectly("torch_dist", 1),
            content_metadata=METADATA,
        )
    torch.save(_random_state(state.device), directory / _random_file(ranks.rank))
    ranks.barrier()
    if ranks.rank == 0:
        record = state.identity() | {
            "updates": state.updates,
            "trainable": state.optimizer is not None,
            "world_size": ranks.size,
        }
        (directory / TRAINER_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    own = [f"{SHARDS}/{path.name}" for path in shards.glob(f"__{ranks.rank}_*.distcp")] + [_random_file(ranks.rank)]
    if ranks.rank == 0:
        common = [path for path in shards.iterdir() if path.suffix != ".distcp"]
        own += [*(f"{SHARDS}/{path.name}" for path in common), TRAINER_FILE]
    facts = file_facts(directory, own)
    ranks.barrier()
    return facts


def load(directory: Path, state: TrainerState) -> None:
    """Read a checkpoint into the live tensors. Collective.

    The random state is restored if this rank saved one; otherwise it stays.

    Raises:
        CheckpointError: a file is missing, truncated, or of another model.
    """
    record = _read_record(directory / TRAINER_FILE, state)
    updates = int(record["updates"])
    with_optimizer = state.optimizer is not None and bool(record["trainable"]) and updates > 0
    shards = directory / SHARDS
    if state.optimizer is not None:
        clear_optimizer(state.optimizer)
        if with_optimizer:
            allocate_state(state.optimizer)
    try:
        with cpu_compatibility.without_cuda_copies(state.device):
            content = dist_checkpointing.load(_content(state, with_optimizer=with_optimizer, loading=True), str(shards))
        if with_optimizer and state.optimizer is not None:
            content["optimizer"] = _for_own_parts(state.optimizer, content["optimizer"])
    except _UNREADABLE as error:
        raise _unreadable(shards, error) from error
    for name, chunk in _named_chunks(state.model):
        missing, _ = chunk.load_state_dict(content[name], strict=False)
        # Frozen weights are those that the model directory has.
        assert not any(map(state.model.saves, missing)), "the reader finds everything or raises"
    if state.optimizer is not None:
        if with_optimizer:
            with cpu_compatibility.without_cuda_copies(state.device):
                state.optimizer.load_state_dict(content["optimizer"])
        else:
            state.optimizer.reload_model_params()
    state.updates = updates
    random_file = directory / _random_file(state.model.ranks.rank)
    if random_file.exists():
        _set_random_state(random_file, state.device)


def _for_own_parts(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Return the loaded state as this layout's optimizer takes it.

    Tensors are found by name in any layout. Parameter groups are not: Megatron-Core keeps the parameters of spread
    experts in an optimizer of their own, whose groups lie under a number.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    numbered = {key: value for key, value in loaded.items() if isinstance(key, int)}
    whole = {key: value for key, value in loaded.items() if not isinstance(key, int)}
    own = [numbered.get(number, {}) for number in range(len(parts))] if len(parts) > 1 else [whole]
    if all(_saved_groups(part) for part in own):
        return loaded
    saved = [part for part in (whole, *numbered.values()) if _saved_groups(part)]
    groups = {group["wd_mult"]: group for part in saved for group in _saved_groups(part)}
    common = {key: value for key, value in saved[0].items() if key not in _OF_PARAMETERS}
    steps = saved[0].get("optimizer", saved[0]).get("state", {}).get("common_step")
    for part, live in zip(own, parts, strict=True):
        inner = part.setdefault("optimizer", {}) if "optimizer" in saved[0] else part
        given = inner.get("param_groups") or [{} for _ in live.optimizer.param_groups]
        inner["param_groups"] = [
            groups[group["wd_mult"]] | {key: group[key] for key in param_group_identifier_keys if key in group} | ids
            for group, ids in zip(live.optimizer.param_groups, given, strict=True)
        ]
        if steps is not None:
            inner.setdefault("state", {})["common_step"] = steps
        for key, value in common.items():
            part.setdefault(key, value)
    return dict(enumerate(own)) if len(parts) > 1 else own[0]


def _saved_groups(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups that come from the checkpoint, of one optimizer's state."""
    groups = part.get("optimizer", part).get("param_groups", [])
    return [group for group in groups if "wd_mult" in group]


def clear_optimizer(optimizer: MegatronOptimizer) -> None:
    """Drop the optimizer's state, as before its first step."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.pop("step", None)


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its initial state, for loading into."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            allocate(part.optimizer)


def allocate(optimizer: torch.optim.Optimizer, _: Any = None) -> None:
    """Give every parameter of one torch optimizer its initial state."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if "momentum" in optimizer.defaults:  # torch's SGD, or TransformerEngine's
            if optimizer.defaults["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
            continue
        state = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one; NVIDIA's count steps in their parameter groups
            state["step"] = torch.zeros((), dtype=torch.float32)
        optimizer.state[parameter] = state


def _named_chunks(model: MegatronModel) -> list[tuple[str, Any]]:
    """Return the chunks under the names that Megatron-Core's optimizers expect."""
    if len(model.chunks) == 1:
        return [("model", model.chunks[0])]
    return [(f"model{number}", chunk) for number, chunk in enumerate(model.chunks)]


def _content(state: TrainerState, *, with_optimizer: bool, loading: bool) -> dict[str, Any]:
    metadata = METADATA | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    if state.lora is not None:
        metadata["non_homogeneous_layers"] = True  # some layers may have no adapters
    content: dict[str, Any] = {
        name: {
            key: tensor for key, tensor in chunk.sharded_state_dict(metadata=metadata).items() if state.model.saves(key)
        }
        for name, chunk in _named_chunks(state.model)
    }
    if with_optimizer and state.optimizer is not None:
        models = content["model"] if len(state.model.chunks) == 1 else dict(content)
        content["optimizer"] = state.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)
    return content


def _read_record(file: Path, state: TrainerState) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file.parent} is not a complete trainer checkpoint: {file.name} is missing")
    try:
        record: dict[str, Any] = {"lora": None} | json.loads(file.read_text(encoding="utf-8"))  # older ones lack it
        different = {key: record[key] for key, value in state.identity().items() if record[key] != value}
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from error
    if different:
        own = state.identity()
        lines = ", ".join(f"{key} {value!r} (this trainer: {own[key]!r})" for key, value in different.items())
        raise CheckpointError(f"{file.parent} is a checkpoint of another model, version or form: {lines}")
    return record


def _unreadable(file: Path, error: BaseException) -> CheckpointError:
    reason = str(error).splitlines()[0] if str(error) else "no details"
    return CheckpointError(
        f"cannot read {file}: {type(error).__name__}: {reason}. It is missing, truncated or damaged; use an earlier"
        " checkpoint."
    )


def _random_file(rank: int) -> str:
    return f"random_{rank}.pt"


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(file: Path, device: torch.device) -> None:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        torch.set_rng_state(state["cpu"])
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error
