"""Two ranks on gloo against one."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chatlearn_fsdp.sharding import box_of_rows
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.tiny import build_tiny_model

SCRIPT = Path(__file__).with_name("rank_process.py")
EVERYTHING = [list(range(7))]


def run_ranks(batch, job, results):
    results.mkdir()
    torch.save(batch, results / "batch.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    world_size = len(job["slices"])
    ranks = [
        subprocess.Popen([sys.executable, SCRIPT, str(rank), str(world_size), rendezvous, json.dumps(job), results])
        for rank in range(world_size)
    ]
    codes = [rank.wait(timeout=120) for rank in ranks]
    assert codes == [0] * world_size
    return [torch.load(results / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_two_ranks_equal_one(make_batch, tmp_path, family) -> None:
    path = str(build_tiny_model(tmp_path / "model", family))
    batch = make_batch()
    options = {"max_tokens_per_micro_batch": 64, "grad_clip": None}
    one = run_ranks(
        batch,
        {"model": path, "slices": EVERYTHING, "options": options, "save": str(tmp_path / "saved1")},
        tmp_path / "one",
    )[0]
    # Uneven on purpose: rank 1 has one micro-batch to rank 0's two, and must keep in step with an empty one.
    job = {"model": path, "slices": [[0, 1, 2, 3, 4, 5], [6]], "options": options, "save": str(tmp_path / "saved2")}
    two = run_ranks(batch, job | {"export": str(tmp_path / "export")}, tmp_path / "two")

    assert [rank["metrics"]["perf/micro_batches"] for rank in two] == [2, 1]
    assert sum(rank["metrics"]["loss"] for rank in two) == pytest.approx(one["metrics"]["loss"], rel=1e-5)
    assert two[0]["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-4)
    assert "grad_norm" not in two[1]["metrics"]
    for name, moment in one["exp_avg"].items():
        assert (two[0]["exp_avg"][name] - moment).norm() <= 1e-4 * moment.norm(), name
    computed = torch.cat([rank["computed"]["logprobs"] for rank in two])
    torch.testing.assert_close(computed, one["computed"]["logprobs"], atol=1e-5, rtol=0)

    full = two[0]["full"]
    count = {name: torch.zeros(tensor.shape) for name, tensor in full.items()}
    for owner, rank in enumerate(two):
        for name, shape, box, owner_rank, tensor in rank["boxes"]:
            place = tuple(slice(*side) for side in box)
            assert owner_rank == owner
            assert tuple(shape) == tuple(full[name].shape)
            assert torch.equal(full[name][place], tensor), name
            count[name][place] += 1
    assert all(bool((seen == 1).all()) for seen in count.values())

    for rank in two:
        assert rank["offloaded_bytes"] == 0
        assert all(torch.equal(rank["again"][name], full[name]) for name in full)
    exported = load_causal_lm(str(tmp_path / "export"), attention="sdpa").state_dict()
    assert torch.equal(exported["model.embed_tokens.weight"], full["model.embed_tokens.weight"])

    # Each world size resumes from what the other saved.
    crossed = run_ranks(
        batch, {"model": path, "slices": EVERYTHING, "load": str(tmp_path / "saved2")}, tmp_path / "one_from_two"
    )[0]
    back = run_ranks(
        batch,
        {"model": path, "slices": [[0, 1, 2], [3, 4, 5, 6]], "load": str(tmp_path / "saved1")},
        tmp_path / "two_from_one",
    )[0]
    assert crossed["metrics"]["grad_norm"] == pytest.approx(back["metrics"]["grad_norm"], rel=1e-4)
    assert crossed["metrics"]["grad_norm"] != pytest.approx(one["metrics"]["grad_norm"], rel=1e-3)
    for name, tensor in crossed["full"].items():
        torch.testing.assert_close(tensor, back["full"][name], atol=1e-5, rtol=0)


@pytest.mark.engine
@pytest.mark.slow
def test_a_bad_loss_on_one_rank_stops_both_and_changes_nothing(make_batch, model_path, tmp_path) -> None:
    job = {"model": model_path, "slices": [[0, 1, 2], [3, 4, 5, 6]], "poison": "s1"}
    ranks = run_ranks(make_batch(), job, tmp_path / "two")
    assert "samples s0, s1, s2" in ranks[0]["error"]
    assert "on another rank" in ranks[1]["error"]
    before = load_causal_lm(model_path).state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in ranks[0]["full"].items())


def test_rows_of_a_fused_tensor_that_lie_in_a_shard() -> None:
    fused = torch.empty(4, 6, 5, device="meta")
    up_of_expert_2 = fused.chunk(2, dim=1)[1].select(0, 2)
    assert box_of_rows(up_of_expert_2, (2, 4), 30) == (0, 3)
    assert box_of_rows(up_of_expert_2, (0, 2), 30) == (0, 0)
    plain = torch.empty(7, 5, device="meta")
    assert box_of_rows(plain, (4, 7), 5) == (4, 7)
