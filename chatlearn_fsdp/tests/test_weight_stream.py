from __future__ import annotations

import pytest

from chatlearn_fsdp.weight_stream import stream_full
from chatlearn_hf.tiny import build_tiny_model


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


@pytest.mark.engine
def test_boxes_take_no_memory_beyond_the_shards(run_jobs, seven_sequences, tmp_path) -> None:
    """Two ranks, counted by operation: gathering takes the whole model, and boxes are views of what is there. Under
    adapters a box is the shard with its adapter merged in, one at a time.
    """
    model = str(build_tiny_model(tmp_path / "model", "qwen3"))
    job = {"model": model, "weights": True, "slices": [[0, 1, 2, 3], [4, 5, 6]], "updates": 1}
    lora = {"options": {"lora": {"rank": 4, "alpha": 8.0}}}
    answers = run_jobs({"plain": job, "lora": job | lora}, seven_sequences, tmp_path / "answers")
    for rank in answers["plain"]:
        sizes = [tensor.nbytes for tensor in rank["full"].values()]
        gathered, largest_gathered = rank["taken"]["full_tensors"]
        assert gathered >= sum(sizes), "the measure sees what is gathered"
        assert largest_gathered >= max(sizes)
        assert rank["taken"]["boxes"] == (0, 0)
    for rank in answers["lora"]:
        _, largest = rank["taken"]["boxes"]
        assert 0 < largest <= max(tensor.nbytes for tensor in rank["full"].values()) / 2, "a rank's half of a tensor"
