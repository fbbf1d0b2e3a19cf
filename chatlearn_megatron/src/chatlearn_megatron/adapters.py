"""Low-rank adapters [2106.09685] on Megatron-Core's linear layers, with the tensors that peft has.

Megatron-Core computes several modules of a transformers model with one matrix (``linear_qkv``: q_proj, k_proj and
v_proj; ``linear_fc1``: gate_proj and up_proj). Each of these modules has an A and a B of its own here, as in peft, and
so a place in peft's files (``adapter_places``). GPT-2's c_attn, which is one module, has one A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.lora import Adapter, LoraSettings, adapters, add_adapters, peft_names
from chatlearn_megatron.families import DISTRIBUTION
from chatlearn_megatron.pieces import Part, Place, Rows

DOWN, UP = "lora_A", "lora_B"
ADAPTED_LINEARS = tuple(
    f"decoder.layers.{{layer}}.{name}"
    for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
)
"""Linear layers that can have adapters."""


def is_adapter(name: str) -> bool:
    """Whether a parameter of a chunk belongs to an adapter."""
    return f".{DOWN}." in name or f".{UP}." in name


def adapter_places(places: Mapping[str, Place]) -> dict[str, Place]:
    """Return the places of all adapters that a family's linear layers may have, under peft's names of their tensors.

    Part ``n`` of a layer's weight has B in the parameter ``lora_B.<n>``; parts of one module share the A of the first.
    """
    found: dict[str, Place] = {}
    for linear in ADAPTED_LINEARS:
        place = places.get(f"{linear}.weight")
        if place is None:
            continue
        by_columns = place.kind == "columns"
        for number, part in enumerate(place.parts):
            down, up = peft_names(part.name)
            if number == first_of_module(place, number):
                found[f"{linear}.{DOWN}.{number}"] = Place("columns" if by_columns else "whole", (Part(down),))
            found[f"{linear}.{UP}.{number}"] = Place("whole" if by_columns else "rows", (Part(up, part.first),))
    return found


def first_of_module(place: Place, number: int) -> int:
    """Return the first part of the module that part ``number`` belongs to."""
    return [part.name for part in place.parts].index(place.parts[number].name)


def adaptable_weights(hf: PreTrainedModel, places: Mapping[str, Place], layers: int) -> dict[str, int]:
    """Return the names of a transformers model's weights that can have adapters, with the index of their layer.

    In a mixture of experts these are weights of attention only: peft reads adapters of its dense MLPs as experts'.
    """
    linears = [name for name in ADAPTED_LINEARS if f"{name}.weight" in places]
    if any(place.expert for place in places.values()):
        linears = [name for name in linears if ".mlp." not in name]
    parts = [part.name for name in linears for part in places[f"{name}.weight"].parts]
    found = {part.format(layer=layer): layer for layer in range(layers) for part in parts}
    modules = dict(hf.named_modules())
    return {name: layer for name, layer in found.items() if name.removesuffix(".weight") in modules}


def choose_adapters(
    hf: PreTrainedModel, settings: LoraSettings, places: Mapping[str, Place], layers: int, parts: int, path: str
) -> None:
    """Add adapters to a transformers model on the ``meta`` device, from which their names and shapes are taken.

    Args:
        hf: the model.
        settings: of the adapters.
        places: of the family.
        layers: number of layers of the model.
        parts: number of parts into which stages divide them.
        path: of the model, for messages.

    Raises:
        ModelError: Megatron-Core's layers cannot have one of them, or a part would have none; names the modules that
            can.
    """
    add_adapters(hf, settings, DISTRIBUTION)
    layer_of, wanted = adaptable_weights(hf, places, layers), adapters(hf)
    if others := sorted({_in_layer(name) for name in wanted if name not in layer_of}):
        there = sorted({_in_layer(name) for name in layer_of})
        raise ModelError(
            f"no adapters for {', '.join(others)} of {path}: the trainer 'megatron' has adapters for {', '.join(there)}"
            " (not for experts and MLPs beside them, latent attention or heads). Name some of these in"
            " lora.target_modules, or use backend: fsdp"
        )
    per_part = layers // parts
    empty = sorted(set(range(parts)) - {layer_of[name] // per_part for name in wanted})
    if empty:
        first = empty[0] * per_part
        raise ModelError(
            f"the layers {first} to {first + per_part - 1} of {path}, one of {parts} parts, get no adapters, so"
            " nothing in them learns; choose lora.target_modules of every part, or fewer parts (pipeline_parallel x"
            " virtual_pipeline)"
        )


def _in_layer(weight: str) -> str:
    """Return ``self_attn.q_proj`` for ``model.layers.0.self_attn.q_proj.weight``."""
    return re.sub(r"^.*?\.\d+\.", "", weight.removesuffix(".weight"))


class AdaptedLinear(nn.Module):
    """What both kinds of linear layers with adapters have in common. Without a call of ``adapt`` it has none."""

    weight: nn.Parameter
    tp_group: torch.distributed.ProcessGroup
    sequence_parallel: bool
    split_axes: Mapping[str, int]
    """Which axis of weight, bias, A and B the tensor parallel ranks share."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self._rows = Rows(1, ())
        self._transposed = False
        self._scale = 0.0
        self._down_of: dict[int, str] = {}
        """Part -> name of its A, of the parts that have an adapter."""

    def adapt(self, place: Place, rows: Rows, adapters: Mapping[str, Adapter]) -> None:
        """Add those of a model's adapters that belong to this layer, with undefined values.

        Args:
            place: of the weight, with the names of its checkpoint tensors.
            rows: of this rank's weight.
            adapters: by the names of weights; of their tensors only the rank counts.
        """
        self._rows = rows
        for number, part in enumerate(place.parts):
            if part.name not in adapters:
                continue
            adapter = adapters[part.name]
            self._transposed, self._scale = adapter.transposed, adapter.scale
            rank, name = adapter.down.shape[0], str(first_of_module(place, number))
            self._down_of[number] = name
            if name not in self.lora_A:
                self.lora_A[name] = self._parameter(rank, self.weight.shape[1])
            self.lora_B[str(number)] = self._parameter(rows.groups * rows.widths[number], rank)
        # With sequence parallelism ranks compute what they hold in common for their own tokens only; Megatron-Core adds
        # up the gradients of marked parameters.
        for parameter in (self.lora_B if DOWN in self.split_axes else self.lora_A).values():
            parameter.sequence_parallel = self.sequence_parallel

    def adapter(self, number: int) -> Adapter | None:
        """Return this rank's part of the adapter of part ``number`` of the weight; None if it has none."""
        if number not in self._down_of:
            return None
        down, up = self.lora_A[self._down_of[number]], self.lora_B[str(number)]
        return Adapter(down.detach(), up.detach(), self._scale, self._transposed)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """See Megatron-Core; the same for adapters."""
        state = self.state_dict(prefix="", keep_vars=True)
        axes = {name: self.split_axes[kind] for name in state if (kind := name.split(".")[0]) in self.split_axes}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        return sharded

    def _parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.weight.dtype, device=self.weight.device))


class AdaptedColumnLinear(AdaptedLinear, ColumnParallelLinear):  # type: ignore[misc]  # Megatron-Core is not typed
    """A linear layer whose output is split over the tensor parallel ranks: each has A, and its rows of B."""

    split_axes: Mapping[str, int] = {"weight": 0, "bias": 0, UP: 0}

    def forward(self, input_: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Return this rank's part of the output [R, 1, out / ranks], and the bias if the caller is to add it."""
        output, bias = super().forward(input_, *args, **named)
        return output + self._change(input_) if self._down_of else output, bias

    def _change(self, input_: Tensor) -> Tensor:
        """Return scale B A x for every part of the output, in the order in which the weight has its rows."""
        low = functional.linear(input_, torch.cat(list(self.lora_A.values())))
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        lows = dict(zip(self.lora_A, low.split([len(down) for down in self.lora_A.values()], -1), strict=True))
        changes: list[Tensor] = []
        groups = self._rows.groups
        for number, width in enumerate(self._rows.widths):
            if number in self._down_of:
                change = functional.linear(lows[self._down_of[number]], self.lora_B[str(number)])
            else:
                change = low.new_zeros(*low.shape[:-1], groups * width)
            changes.append(change.view(*low.shape[:-1], groups, width))
        return torch.cat(changes, -1).flatten(-2) * self._scale


class AdaptedRowLinear(AdaptedLinear, RowParallelLinear):  # type: ignore[misc]  # as above
    """A linear layer whose input is split over the tensor parallel ranks: each has its columns of A, and B."""

    split_axes: Mapping[str, int] = {"weight": 1, DOWN: 1}

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output [R, 1, out], with sequence parallelism of this rank's tokens, and the bias if the caller is
        to add it.
        """
        output, bias = super().forward(input_)
        if not self._down_of:
            return output, bias
        [down], [up] = self.lora_A.values(), self.lora_B.values()
        low = functional.linear(input_, down)
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return output + functional.linear(low, up) * self._scale, bias
