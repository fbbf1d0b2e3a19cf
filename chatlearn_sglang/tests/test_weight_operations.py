"""The loader that SGLang calls in every rank, without SGLang."""

from __future__ import annotations

import itertools
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from chatlearn_hosting import SharedBlock, handle_content
from chatlearn_sglang.engine_side import adapter, weight_operations
from chatlearn_sglang.engine_side.outcome import Outcome
from chatlearn_sglang.engine_side.weight_operations import encode


class Model:
    """Takes what it is given, as SGLang's models do."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors) -> None:
        for name, tensor in tensors:
            if name == "misfit":
                raise ValueError("shapes differ")
            self.loaded[name] = tensor.clone()


@pytest.fixture
def rank(monkeypatch):
    """``rank(*operations)`` runs (name, content) pairs, of one sync, on rank 1 and returns (model, errors)."""
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_rank=1)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setattr(weight_operations, "_syncs", {})
    outcome, numbers = Outcome(), itertools.count()

    def run(*operations):
        model = Model()
        outcome.clear()
        of_sync = {"sync": next(numbers), "adapter": False, "copies": {}}
        for operation, content in operations:
            [(_, request)] = pickle.loads(encode(operation, of_sync | content, outcome.path))
            weight_operations.apply(model, [("request", request)])
        return model, outcome.errors()

    yield run
    outcome.close()


def test_a_block_is_read_in_place_and_a_tied_tensor_under_both_names(rank) -> None:
    with SharedBlock(4096) as block:
        block.add("embed", torch.arange(6.0).view(2, 3))
        block.add("norm", torch.ones(2, dtype=torch.bfloat16))
        model, errors = rank(("block", handle_content(block.handle()) | {"copies": {"embed": ["head"]}}))
    assert errors == []
    assert torch.equal(model.loaded["head"], torch.arange(6.0).view(2, 3))
    assert model.loaded["norm"].dtype == torch.bfloat16


def test_a_checkpoint_is_read_under_the_names_that_were_asked_for(rank, tmp_path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "x.safetensors")
    model, errors = rank(("checkpoint", {"files": [(str(tmp_path / "x.safetensors"), [("b", "c")])]}))
    assert errors == []
    assert list(model.loaded) == ["c"]


def test_a_fault_is_reported_with_its_rank_and_not_raised(rank) -> None:
    with SharedBlock(4096) as block:
        block.add("misfit", torch.ones(2))
        _, errors = rank(("block", handle_content(block.handle())))
    assert errors == ["rank 1: ValueError: shapes differ"]
    assert rank(("leave", {"name": "never joined"}))[1] == []


def test_an_adapter_is_served_once_complete_and_no_weight_changes(rank, monkeypatch) -> None:
    served = []
    monkeypatch.setattr(adapter, "replace", lambda *arguments: served.append(arguments))
    blocks = []
    for name in ("a", "b"):
        with SharedBlock(4096) as block:
            block.add(name, torch.ones(2))
            blocks.append(rank(("block", handle_content(block.handle()) | {"adapter": True, "sync": -1})))
    assert [(model.loaded, errors) for model, errors in blocks] == [({}, [])] * 2
    assert served == []
    content = {"sync": -1, "adapter": True, "config": {"r": 2}, "absent": [("c", "float32", [2])]}
    assert rank(("adapter", content))[1] == []
    [(tensors, config, absent)] = served
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert (config, absent) == ({"r": 2}, [("c", "float32", [2])])


def test_remains_of_a_failed_sync_are_discarded(rank, monkeypatch) -> None:
    served = []
    monkeypatch.setattr(adapter, "replace", lambda tensors, *_: served.append(set(tensors)))
    with SharedBlock(4096) as block:
        block.add("old", torch.ones(2))
        rank(("block", handle_content(block.handle()) | {"adapter": True}))
    with SharedBlock(4096) as block:
        block.add("new", torch.ones(2))
        of_adapter = {"adapter": True, "config": {}, "absent": []}
        rank(("block", handle_content(block.handle()) | of_adapter), ("adapter", of_adapter))
    assert served == [{"new"}]


def test_missing_reports_are_an_error() -> None:
    outcome = Outcome()
    assert outcome.errors() == ["no rank of the engine has reported"]
    outcome.close()
