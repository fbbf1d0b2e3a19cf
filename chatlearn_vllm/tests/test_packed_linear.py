"""Packed weights of layers on a CPU: read back exactly, freed, and packed again."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.engine


@pytest.fixture
def make_linear():
    """``make_linear(outputs, inputs, dtype, remove_weight)``: (layer as vLLM packs it, its weights before that)."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from chatlearn_vllm.engine_side.process_state import allow_amx

    allow_amx()

    def make(outputs, inputs, dtype, *, remove_weight=True):
        layer = nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
        values = layer.weight.clone()
        record_metadata_for_reloading(layer)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=remove_weight)
        return layer, values

    return make


def multiply(layer, inputs, dtype):
    return layer.cpu_linear(torch.randn(3, inputs, generator=torch.manual_seed(1)).to(dtype), layer.weight, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(384, 128), (8, 128), (48, 1100)], ids=str)
def test_weights_are_read_back_bit_by_bit_and_packed_again(make_linear, shape, dtype):
    """(48, 1100): more inputs than rows of the identity that are multiplied at a time."""
    from chatlearn_vllm.engine_side.packed_linear import UnpackedLinear, is_packed, packed_bytes, packed_tensors

    layer, values = make_linear(*shape, dtype)
    if dtype == torch.bfloat16 and layer.weight.numel():  # vLLM packs bfloat16 only on CPUs with kernels for it
        assert not is_packed(layer)
        assert torch.equal(layer.weight, values)
        return
    empty, before = layer.weight, multiply(layer, shape[1], dtype)
    assert not empty.numel(), "the weights are in the packed copy alone"
    assert packed_bytes(layer) + sum(tensor.nbytes for tensor in packed_tensors(layer)) >= values.nbytes
    kernel = weakref.ref(layer.cpu_linear)
    unpacked = UnpackedLinear(layer, keep_values=True)
    assert torch.equal(unpacked._values, values)
    assert kernel() is None, "a reference to the packed copy remains"
    assert not is_packed(layer)
    assert packed_bytes(layer) == 0
    unpacked.pack()
    assert is_packed(layer)
    assert layer.weight is empty
    assert torch.equal(multiply(layer, shape[1], dtype), before)


def test_a_layer_that_keeps_its_parameter_is_packed_from_what_the_parameter_then_holds(make_linear):
    """As of an embedding, which is also a head."""
    from chatlearn_vllm.engine_side.packed_linear import UnpackedLinear

    layer, values = make_linear(64, 32, torch.float32, remove_weight=False)
    unpacked = UnpackedLinear(layer, keep_values=True)
    layer.weight.data = values * 2
    unpacked.pack()
    expected = torch.randn(3, 32, generator=torch.manual_seed(1)) @ (values * 2).t()
    torch.testing.assert_close(multiply(layer, 32, torch.float32), expected)


def test_dropped_values_come_back_as_zeros(make_linear):
    from chatlearn_vllm.engine_side.packed_linear import UnpackedLinear

    layer, _ = make_linear(64, 32, torch.float32)
    unpacked = UnpackedLinear(layer, keep_values=False)
    assert unpacked._values is None
    unpacked.pack()
    assert not multiply(layer, 32, torch.float32).any()
