from __future__ import annotations

import pytest

from chatlearn_fsdp.weight_stream import stream_full


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_owns_about_as_many_bytes(make_trainer, num_ranks) -> None:
    """Ownership is spread so that sending takes less time with more ranks; what is streamed does not change."""
    trainer = make_trainer()
    layout = trainer._checkpoint_layout()
    shards = list(stream_full(trainer._ready().model, layout, num_ranks))
    assert [shard.name for shard in shards] == list(trainer.manifest().tensors)
    owned = [sum(s.tensor.nbytes for s in shards if s.owner_rank == rank) for rank in range(num_ranks)]
    largest = max(shard.tensor.nbytes for shard in shards)
    assert max(owned) - min(owned) <= largest, "no more apart than one tensor"
    again = [shard.owner_rank for shard in stream_full(trainer._ready().model, layout, num_ranks)]
    assert again == [shard.owner_rank for shard in shards], "every rank finds the same owners"
