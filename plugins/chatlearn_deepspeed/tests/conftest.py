"""A batch, and ranks that do jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_hosting.fork_server import ForkServer

LENGTHS = [17, 40, 1, 7, 38, 22, 9]
VOCABULARY = 300
RANKS_DEADLINE_S = 400.0


def _make_batch(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> TrainBatch:
    """Random tokens; ``loss_weight`` is a token mean over the batch, as a loss's ``prepare`` would leave it."""
    generator = torch.Generator().manual_seed(seed)
    total, bounds = sum(lengths), cumulative_lengths(lengths)
    mask = torch.rand(total, generator=generator) < 0.7
    mask[bounds[:-1].long()] = False
    count = len(lengths)
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(count)),
        token_ids=torch.randint(0, VOCABULARY, (total,), generator=generator),
        cu_seqlens=bounds,
        loss_mask=mask,
        unit_index=torch.arange(count),
        group_index=torch.arange(count),
        token_data={"loss_weight": mask / mask.sum(), "advantages": torch.randn(total, generator=generator)},
    )


@pytest.fixture(scope="session")
def seven_sequences() -> TrainBatch:
    return _make_batch()


def _run_jobs(
    server: ForkServer, jobs: Mapping[str, Mapping[str, Any]], batch: TrainBatch, directory: Path
) -> dict[str, list[dict[str, Any]]]:
    """Start as many rank processes as the largest job needs and let them do all jobs; answers of every rank, by job.

    A job has ``model`` and ``slices`` (the sequences of each data-parallel rank), and may have ``options``, ``head``,
    ``trainable``, ``updates`` (number of them), ``load``, ``save``, ``export``, ``load_model`` (directories),
    ``memory`` (bucket sizes in bytes), ``take`` (the share that a refresh keeps), ``poison`` (the loss of a
    micro-batch with this sample is NaN).
    """
    defaults = dict.fromkeys(("load", "save", "export", "load_model", "memory", "take", "poison"))
    defaults |= {"head": "lm", "updates": 1, "trainable": True}
    complete = {name: defaults | {"options": {}} | job for name, job in jobs.items()}
    for name, job in complete.items():
        job["world"] = len(job["slices"]) * job["options"].get("ulysses", 1) * job["options"].get("ring", 1)
        # Not tcp: connections of one job may take the port that was free for a later one.
        job["rendezvous"] = f"file://{directory / name}.rendezvous" if job["world"] > 1 else None
    directory.mkdir(parents=True)
    torch.save({"jobs": complete, "batch": batch}, directory / "work.pt")
    size = max(job["world"] for job in complete.values())
    ranks = [server.start("zero_rank_process:main", str(rank), str(directory)) for rank in range(size)]
    try:
        deadline = time.monotonic() + RANKS_DEADLINE_S
        # A rank that died leaves the others waiting for it, so the first to fail ends it.
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            assert time.monotonic() < deadline, "the ranks did not finish"
            time.sleep(0.1)
        assert not any(rank.returncode for rank in ranks), "a rank failed; its error is above"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {
        name: [torch.load(directory / f"{name}.rank{rank}.pt", weights_only=False) for rank in range(job["world"])]
        for name, job in complete.items()
    }


@pytest.fixture(scope="session")
def run_jobs() -> Iterator[Callable[..., dict[str, list[dict[str, Any]]]]]:
    """``run_jobs(jobs, batch, directory)``, see ``_run_jobs``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        with ForkServer("zero_rank_process", path=[str(Path(__file__).parent)]) as server:
            yield partial(_run_jobs, server)
