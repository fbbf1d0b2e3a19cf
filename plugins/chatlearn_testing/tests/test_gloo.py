"""The protocols work over several processes: ranks that shard and export, and a loss on the last stage only."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest, merge_metrics
from chatlearn_testing.batches import MaskedPolicyLoss, make_batch
from chatlearn_testing.fakes.bigram import bigram_manifest, build_bigram_model, read_bigram_tensors
from chatlearn_testing.fakes.box_sync import OFFER, FakeBoxReceiver
from chatlearn_testing.fakes.generator import FakeGenerator
from chatlearn_testing.fakes.options import FakeOptions, FakeTrainerOptions
from chatlearn_testing.fakes.trainer import FakeTrainer

SCRIPT = Path(__file__).with_name("gloo_ranks.py")
TIMEOUT_S = 120.0

pytestmark = pytest.mark.slow  # two processes that import torch


def run_ranks(scenario: str, directory: Path) -> list[Any]:
    """What each of two ranks answered; a rank that fails ends the test with its own words."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), scenario, str(rank), str(directory)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, f"rank {rank}:\n{errors}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [pickle.loads((directory / f"answer-{rank}").read_bytes()) for rank in range(2)]


def _endpoint(role: str, rank: int) -> Endpoint:
    return Endpoint(role, 0, rank, socket.gethostname(), "cpu", os.getpid())


def test_a_two_rank_trainer_exports_boxes_that_a_receiver_assembles(tmp_path: Path) -> None:
    model = build_bigram_model(tmp_path / "model")
    plan = SyncRequest(
        sync_id="two-ranks",
        policy_version=1,
        base_version=None,
        payload="full",
        channel="tensors",
        export="boxes",
        manifest=bigram_manifest(read_bigram_tensors(model)),
        senders=(_endpoint("trainer", 0), _endpoint("trainer", 1)),
        receivers=(_endpoint("generator", 0),),
        fleet_rule="barrier",
        bucket_bytes=1 << 20,
        timeout_s=TIMEOUT_S,
        workspace=str(tmp_path / "workspace"),
    )
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    (first_metrics, first_shapes, whole), (second_metrics, second_shapes, other_whole) = run_ranks(
        "two_rank_trainer", tmp_path
    )
    # Really sharded: each rank holds half of the rows.
    assert first_shapes == second_shapes == {"transition.weight": (16, 32), "unigram.bias": (16,)}

    # One process on the whole batch is the independent source.
    source = ModelSource(str(model), str(model))
    alone = FakeTrainer(FakeTrainerOptions(), RoleContext("trainer", source, trainable=True))
    alone.setup()
    loss = MaskedPolicyLoss()
    for parts in zip(first_metrics, second_metrics, strict=True):
        expected, found = alone.update(loss.prepare(make_batch(32)), loss), merge_metrics(*parts)
        for name in ("loss", "grad_norm", "policy/logprob"):
            assert found[name].value == pytest.approx(expected[name].value, rel=1e-5), name
    for shard in alone.weights():
        torch.testing.assert_close(whole[shard.name], shard.tensor, rtol=1e-5, atol=1e-6)
        assert torch.equal(whole[shard.name], other_whole[shard.name])

    generator = FakeGenerator(FakeOptions(), RoleContext("generator", source))
    generator.setup()

    async def receive() -> int:
        await generator.loader.begin(1, plan.manifest)
        receiver = FakeBoxReceiver(FakeOptions(), plan.receivers[0])
        await receiver.receive(plan, [SyncOffer(rank, OFFER) for rank in range(2)], generator.loader)
        return await generator.loader.finish()

    assert asyncio.run(receive()) == 1
    assert {name: torch.equal(tensor, whole[name]) for name, tensor in generator.live_weights().items()} == {
        "transition.weight": True,
        "unigram.bias": True,
    }

    # Two ranks wrote the checkpoint; one reads it.
    resumed = FakeTrainer(FakeTrainerOptions(), RoleContext("trainer", source, trainable=True))
    resumed.setup()
    resumed.load(tmp_path / "checkpoint")
    assert all(torch.equal(shard.tensor, whole[shard.name]) for shard in resumed.weights())


def test_a_loss_that_runs_on_the_last_of_two_stages(tmp_path: Path) -> None:
    (_, embedding_grad), (total, head_grad) = run_ranks("two_stages", tmp_path)

    specification = importlib.util.spec_from_file_location("gloo_ranks", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    ranks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(ranks)
    embedding, head = ranks.stage_weights()
    loss = MaskedPolicyLoss()
    batch = loss.prepare(make_batch(32))
    expected = loss(ranks.stage_outputs(embedding[batch.token_ids].tanh(), head, batch), batch).total
    expected.backward()

    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(embedding_grad, embedding.grad)
    torch.testing.assert_close(head_grad, head.grad)
    assert embedding_grad.norm() > 0
