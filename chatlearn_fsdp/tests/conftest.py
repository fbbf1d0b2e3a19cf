"""A tiny model, batches and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from chatlearn_core.protocols import LossOutput, ModelSource, RoleContext
from chatlearn_core.types import Metric, OutputRequest, Outputs, TrainBatch, cumulative_lengths
from chatlearn_fsdp.optimizer import optimizer_tensors
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.tiny import build_tiny_model

LENGTHS = [17, 40, 1, 7, 38, 22, 9]
VOCABULARY = 300


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
        },
        sequence_data={"target": torch.randn(count, generator=generator)},
    )


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
