import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_trainer_kit.offload import OffloadedPart, OffloadedParts, live_bytes


def test_shared_storage_counts_once_and_views_survive() -> None:
    base = torch.arange(12.0)
    view = base.view(3, 4)[1:]
    expected = view.clone()
    part = OffloadedPart()
    assert live_bytes([base, view]) == 48
    part.offload([base, view])
    assert live_bytes([base, view]) == 0
    part.offload([base])
    part.onload()
    assert torch.equal(view, expected)
    assert not part.is_offloaded


def test_parts_that_are_away_are_named() -> None:
    weights, moments = torch.arange(3.0), torch.arange(4.0)
    parts = OffloadedParts(("weights", "optimizer"), lambda part: [weights] if part == "weights" else [moments])
    parts.offload({"weights", "optimizer", "kv_cache"})
    assert live_bytes([weights, moments]) == 0
    with pytest.raises(BackendError, match="role 'policy' cannot work while its weights and optimizer are off"):
        parts.require("role 'policy'", ("weights", "optimizer"))
    parts.onload({"weights"})
    parts.require("role 'policy'", ("weights",))
    with pytest.raises(BackendError, match="while its optimizer is offloaded"):
        parts.require("role 'policy'", ("optimizer",))
    parts.onload({"optimizer"})
    assert torch.equal(moments, torch.arange(4.0))
