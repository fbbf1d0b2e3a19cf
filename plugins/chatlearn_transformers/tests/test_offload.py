from __future__ import annotations

import torch

from chatlearn_transformers.offload import WeightStore


def tied_model():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    model.register_buffer("scale", torch.ones(2), persistent=False)
    return model


def test_weights_leave_and_come_back_unchanged_and_tied():
    model = tied_model()
    before = model["embed"].weight.detach().clone()
    store = WeightStore(model)
    store.offload()
    store.offload()
    assert store.holds_weights
    assert [t.numel() for t in (*model.parameters(), *model.buffers())] == [0, 0]
    store.onload()
    store.onload()
    assert not store.holds_weights
    assert torch.equal(model["head"].weight, before)
    assert model["head"].weight is model["embed"].weight
    assert model.scale.tolist() == [1.0, 1.0]
