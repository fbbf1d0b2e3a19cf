import torch

from chatlearn_fsdp.memory import OffloadedPart, live_bytes


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
