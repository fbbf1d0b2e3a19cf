"""A tiny model, batches and losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from chatlearn_core.protocols import LossOutput, ModelSource, RoleContext
from chatlearn_core.types import Metric, OutputRequest, Outputs, TrainBatch, cumulative_lengths
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hosting.fork_server import ForkServer
from chatlearn_trainer_kit.optimizer import optimizer_tensors

LENGTHS = [17, 40, 1, 7, 38, 22, 9]
VOCABULARY = 300
RANKS_DEADLINE_S = 240.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


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
        token_data={
            "loss_weight": mask / mask.sum(),
            "advantages": torch.randn(total, generator=generator),
            "chosen": torch.arange(2 * total).reshape(total, 2) % 300,
        },
        sequence_data={"target": torch.randn(count, generator=generator)},
    )


def _make_grouped_batch() -> TrainBatch:
    """Three groups of four, their sequences in turns, with completions of several lengths after equal prompts; the
    prompt of one sequence departs from its group's in the middle.
    """
    prompts, per_group = [20, 9, 30], 4
    lengths = [prompts[i % 3] + 3 + 5 * (i % 4) for i in range(3 * per_group)]
    batch = _make_batch(3, lengths)
    bounds = batch.cu_seqlens.tolist()
    for i, start in enumerate(bounds[:-1]):
        prompt, model = prompts[i % 3], bounds[i % 3]
        batch.token_ids[start : start + prompt] = batch.token_ids[model : model + prompt]
        batch.loss_mask[start : start + prompt] = False
    batch.token_ids[bounds[7] + 4] += 1
    batch.group_index = torch.arange(len(lengths)) % 3
    batch.token_data["loss_weight"] = batch.loss_mask / batch.loss_mask.sum()
    return batch


@dataclass(frozen=True)
class PolicyLoss:
    """-sum w (A logprob + 0.1 entropy)."""

    temperature: float = 0.7
    unit: str = "sequence"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs", "entropy"}), self.temperature)

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        weight, advantage = batch.token_data["loss_weight"], batch.token_data["advantages"]
        total = -(weight * (advantage * outputs["logprobs"] + 0.1 * outputs["entropy"])).sum()
        tokens = float(batch.loss_mask.sum())
        entropy = Metric(float(outputs["entropy"].detach()[batch.loss_mask].sum()), tokens)
        return LossOutput(total, {"entropy": entropy})


TrainerMaker = Callable[..., FSDPTrainer]


@pytest.fixture
def make_trainer(model_path: str) -> Iterator[TrainerMaker]:
    made: list[FSDPTrainer] = []

    def make(
        *, head: str = "lm", trainable: bool = True, path: str = "", total_updates: int | None = None, **options: object
    ) -> FSDPTrainer:
        source = ModelSource(path or model_path, model_path, head=head)  # type: ignore[arg-type]
        context = RoleContext("trainer", source, trainable=trainable, total_updates=total_updates)
        trainer = FSDPTrainer(FSDPOptions(**({"learning_rate": 1e-3} | options)), context)
        trainer.setup()
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    return _make_batch


@pytest.fixture
def make_grouped_batch() -> Callable[[], TrainBatch]:
    return _make_grouped_batch


def _run_jobs(
    server: ForkServer, jobs: Mapping[str, Mapping[str, Any]], batch: TrainBatch, directory: Path
) -> dict[str, list[dict[str, Any]]]:
    """Start as many rank processes as the largest job needs and let them do all jobs; answers of every rank, by job.

    A job has ``model`` and ``slices`` (the sequences of each data-parallel rank), and may have ``options``,
    ``head``, ``updates`` (number of them), ``load``, ``save``, ``save_beside`` (an update), ``export``
    (directories), ``weights`` (return both streams, before and after offloading), ``take`` (``file``, ``boxes``,
    ``decay``: another trainer's stream, which it follows), ``poison`` (the loss of a micro-batch with this sample
    is NaN), ``loss`` and ``batch`` (an algorithm's, prepared).
    """
    defaults = dict.fromkeys(("load", "save", "save_beside", "export", "weights", "take", "poison", "loss", "batch"))
    complete = {name: defaults | {"head": "lm", "updates": 1, "options": {}} | job for name, job in jobs.items()}
    for name, job in complete.items():
        job["world"] = len(job["slices"]) * FSDPOptions(**job["options"]).ranks_per_slice
        # Not tcp: connections of one job may take the port that was free for a later one.
        job["rendezvous"] = f"file://{directory / name}.rendezvous" if job["world"] > 1 else None
    directory.mkdir(parents=True)
    torch.save({"jobs": complete, "batch": batch}, directory / "work.pt")
    size = max(job["world"] for job in complete.values())
    ranks = [server.start("rank_process:main", str(rank), str(directory)) for rank in range(size)]
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
    with ForkServer("rank_process", path=[str(Path(__file__).parent)]) as server:
        yield partial(_run_jobs, server)


@pytest.fixture(scope="session")
def seven_sequences() -> TrainBatch:
    return _make_batch()


@pytest.fixture(scope="session")
def grouped_sequences() -> TrainBatch:
    return _make_grouped_batch()


@pytest.fixture
def policy_loss() -> PolicyLoss:
    return PolicyLoss()


@pytest.fixture
def weights_of() -> Callable[[FSDPTrainer], dict[str, torch.Tensor]]:
    """A copy of every checkpoint tensor."""
    return lambda trainer: {shard.name: shard.tensor.clone() for shard in trainer.weights()}


@pytest.fixture
def gradients_of() -> Callable[[FSDPTrainer], dict[str, torch.Tensor]]:
    """Pre-clip gradients of a trainer's first update: AdamW starts from 0, so exp_avg = (1 - beta1) * gradient."""

    def gradients(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
        assert trainer.options.grad_clip is None
        assert trainer.num_updates == 1
        assert trainer._optimizer is not None
        assert trainer._model is not None
        moments = optimizer_tensors(trainer._optimizer, trainer._model.model)
        return {name: entry["exp_avg"] / (1 - trainer.options.adam_beta1) for name, entry in moments.items()}

    return gradients
