"""Loads new weights inside vLLM's worker processes, as an engine of vLLM's weight-transfer interface.

In every worker, vLLM calls ``start_weight_update``, ``update_weights`` and ``finish_weight_update`` of the engine named
in its ``weight_transfer_config``. This engine takes buckets of whole tensors under checkpoint names from five sources
(see ``WeightUpdate``) and passes them to vLLM's layerwise reload, which fuses, shards and packs them as at the first
load. Written for vLLM 0.32 (``versions.SUPPORTED``) and tested with it on dense models with tied and untied heads and
on a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from chatlearn_hosting.engine_side.blocks import MappedBlocks
from chatlearn_hosting.engine_side.cuda_blocks import open_cuda_block
from chatlearn_hosting.engine_side.groups import JoinedGroups
from chatlearn_hosting.engine_side.local_groups import keep_local_stores_local

from . import scored_prompts
from .cpu_collectives import add_missing_collectives
from .pipeline_stages import make_stage_inputs
from .process_state import allow_amx, engine_log, keep_freed_memory
from .seeded_draws import install
from .weight_transfer_name import BACKEND
from .worker_memory import WorkerMemory

keep_local_stores_local()  # workers import this module before they connect
_MAX_NAMES = 5
_COPIED = "chatlearn_copied"
"""Attribute that marks a pending tensor as already copied."""

Named = Iterable[tuple[str, Tensor]]


@dataclass
class GroupRequest(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """A request to join or leave a process group; ``init_weight_transfer_engine`` may be called any number of times."""

    action: Literal["join", "leave"]
    name: str
    address: str = ""
    backend: str = "gloo"
    world_size: int = 0
    first_rank: int = 0
    timeout_s: float = 0.0
    secret: str | None = field(default=None, repr=False)


@dataclass
class WeightUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """One bucket of weights."""

    source: Literal["tensors", "checkpoint", "block", "cuda_block", "broadcast"]
    content: Any
    """The content, by source. ``tensors``: pairs (name, tensor), for a worker in this process. ``checkpoint``: under
    ``files``, safetensors files, each with [(name in the file, name to load)]. ``block``: the result of
    ``chatlearn_hosting.handle_content``. ``cuda_block``: see ``open_cuda_block``. ``broadcast``: see
    ``JoinedGroups.receive``."""
    copies: Mapping[str, list[str]]
    """name -> further names under which the same tensor is loaded (a tied head, which vLLM packs separately)."""


class CheckpointNameTransfer(WeightTransferEngine[GroupRequest, WeightUpdate]):  # type: ignore[misc]  # as above
    """Loads tensors by their checkpoint names; each worker has one object."""

    init_info_cls = GroupRequest
    update_info_cls = WeightUpdate

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._groups = JoinedGroups()
        self._blocks = MappedBlocks()
        if self.device.type == "cpu":
            keep_freed_memory()

    def init_transfer_engine(self, init_info: GroupRequest) -> None:
        """Join or leave a group. Joining twice does nothing."""
        if init_info.action == "leave":
            self._groups.leave(init_info.name)
        else:
            self._groups.join(asdict(init_info), self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Prepare every layer for reloading."""
        _reset_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. After it returns, nothing refers to the bucket's memory."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightUpdate) -> None:
        """Pass a bucket to the model's own loading code, which fuses and shards the tensors."""
        with self._tensors(update_info) as tensors:
            self.model.load_weights(_with_copies(tensors, update_info.copies))
            del tensors
            _copy_pending_tensors(self.model)

    def finish_weight_update(self) -> None:
        """Process the pending layers.

        Raises:
            RuntimeError: a layer with weights received none and would keep the old ones.
        """
        stale = _stale_layers(self.model)
        if stale:
            more = f" and {len(stale) - _MAX_NAMES} more" if len(stale) > _MAX_NAMES else ""
            raise RuntimeError(f"no new weights reached {', '.join(stale[:_MAX_NAMES])}{more}")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave every group."""
        self._groups.close()
        self._blocks.close()

    @contextmanager
    def _tensors(self, update: WeightUpdate) -> Iterator[Named]:
        """Yield the bucket's tensors, which are valid inside the context."""
        content = update.content
        if update.source == "tensors":
            yield content
        elif update.source == "checkpoint":
            yield _read_files(content["files"])
        elif update.source == "cuda_block":
            yield open_cuda_block(content, torch.cuda.current_device())
        elif update.source == "block":
            with self._blocks.read(content) as tensors:
                yield tensors
        else:
            yield self._groups.receive(content, self.device)


class WorkerExtension:
    """Methods added to vLLM's worker. Before computing anything, vLLM imports this module in every worker, which
    registers the engine above.
    """

    def chatlearn_prepare(self, log_level: str) -> bool:
        """Prepare the worker before the first request. A worker in its own process logs like the engine.

        Returns whether it computes logprobs of given tokens at any temperature.
        """
        engine_log(log_level)
        install(self.model_runner)  # type: ignore[attr-defined]  # self is a vLLM worker
        make_stage_inputs(self.model_runner)  # type: ignore[attr-defined]  # as above
        self._chatlearn_memory = WorkerMemory(self)
        return scored_prompts.install(self.model_runner)  # type: ignore[attr-defined]  # as above

    def chatlearn_live_bytes(self, part: str) -> int:
        """See ``WorkerMemory``."""
        return self._chatlearn_memory.live_bytes(part)

    def chatlearn_sleep(self, level: int) -> None:
        """See ``WorkerMemory``; CPU only."""
        self._chatlearn_memory.sleep(level)

    def chatlearn_wake(self, parts: list[str]) -> None:
        """See ``WorkerMemory``; CPU only."""
        self._chatlearn_memory.wake(parts)


def _with_copies(tensors: Named, copies: Mapping[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        for other in copies.get(name, ()):
            yield other, tensor


def _read_files(files: Iterable[tuple[str, list[tuple[str, str]]]]) -> Iterator[tuple[str, Tensor]]:
    for file, names in files:
        with safe_open(file, framework="pt") as handle:
            for stored, name in names:
                yield name, handle.get_tensor(stored)


def _reset_expert_kernels(model: torch.nn.Module) -> None:
    """Make a CPU model pack its experts again.

    Creating the kernel of fused experts on a CPU packs them into the kernel's layout. vLLM 0.32 creates it only at the
    first load, so after a reload the kernel silently reads plain weights as packed ones. When the kernel is absent,
    vLLM creates it and packs.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _copy_pending_tensors(model: torch.nn.Module) -> None:
    """Copy the tensors that the layerwise reload keeps for incomplete layers: the sender reuses their memory."""
    for module in model.modules():
        for _, bound in get_layerwise_info(module).loaded_weights:
            for name, value in bound.arguments.items():
                if isinstance(value, Tensor) and not value.is_meta and not hasattr(value, _COPIED):
                    copy = value.detach().clone()
                    setattr(copy, _COPIED, True)
                    bound.arguments[name] = copy


def _stale_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of layers that have parameters, none of which was loaded."""
    found = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if info.can_load() and not info.load_numel and any(p is not None for p in module._parameters.values()):
            found.append(name)
    return found


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, CheckpointNameTransfer)
allow_amx()
add_missing_collectives()
