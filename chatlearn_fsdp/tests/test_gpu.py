"""What only a CUDA device can show: the flash kernels' numbers, mixed precision, and memory that is really freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chatlearn_core.protocols import Loss, MemoryPart, ModelSource, RoleContext
from chatlearn_core.types import OutputRequest, TrainBatch
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_testing.model_directory import read_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
LOGPROBS = OutputRequest(frozenset({"logprobs"}))


@pytest.fixture
def on_gpu(model_path: str) -> Iterator[Callable[..., FSDPTrainer]]:
    made: list[FSDPTrainer] = []

    def make(**options: object) -> FSDPTrainer:
        context = RoleContext("trainer", ModelSource(model_path, model_path), device="cuda", trainable=True)
        trainer = FSDPTrainer(FSDPOptions(**({"learning_rate": 1e-3} | options)), context)
        trainer.setup()
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.15)])
def test_logprobs_equal_those_on_the_cpu(
    dtype: str,
    tolerance: float,
    on_gpu: Callable[..., FSDPTrainer],
    make_trainer: Callable[..., FSDPTrainer],
    make_batch: Callable[..., TrainBatch],
) -> None:
    """bfloat16 takes the flash kernels where torch has them."""
    batch = make_batch()
    expected = make_trainer().compute(batch, LOGPROBS)["logprobs"]
    found = on_gpu(param_dtype=dtype).compute(batch, LOGPROBS)["logprobs"]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.15)])
def test_shared_prompts_change_no_logprob(
    dtype: str, tolerance: float, on_gpu: Callable[..., FSDPTrainer], make_grouped_batch: Callable[[], TrainBatch]
) -> None:
    batch = make_grouped_batch()
    on, off = (on_gpu(param_dtype=dtype, share_prompts=s).compute(batch, LOGPROBS)["logprobs"] for s in (True, False))
    torch.testing.assert_close(on, off, rtol=0, atol=tolerance)


def test_an_update_has_the_gradient_norm_of_the_cpu(
    on_gpu: Callable[..., FSDPTrainer],
    make_trainer: Callable[..., FSDPTrainer],
    make_batch: Callable[..., TrainBatch],
    policy_loss: Loss,
) -> None:
    batch = make_batch()
    expected = make_trainer().update(batch, policy_loss)["grad_norm"].value
    assert on_gpu().update(batch, policy_loss)["grad_norm"].value == pytest.approx(expected, rel=1e-3)


def test_offload_frees_device_memory(
    on_gpu: Callable[..., FSDPTrainer], make_batch: Callable[..., TrainBatch], policy_loss: Loss, model_path: str
) -> None:
    """Beside what is freed, torch holds what its matrix library works in, until the process ends."""
    trainer = on_gpu()
    trainer.update(make_batch(), policy_loss)
    weights = sum(tensor.nbytes for tensor in read_checkpoint(Path(model_path)).values())
    held = torch.cuda.memory_allocated()
    trainer.offload({"weights", "gradients", "optimizer"})
    assert held - torch.cuda.memory_allocated() >= 3 * weights > 0, "the weights and Adam's two moments"
    trainer.onload({"weights", "gradients", "optimizer"})
    assert torch.cuda.memory_allocated() >= held


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_part_frees_as_much_as_it_measured_for_other_processes_too(
    part: MemoryPart, on_gpu: Callable[..., FSDPTrainer], make_batch: Callable[..., TrainBatch], policy_loss: Loss
) -> None:
    """torch rounds every tensor up to 512 bytes, so it frees a little more; what it keeps cached frees nothing."""
    trainer = on_gpu()
    trainer.update(make_batch(), policy_loss)
    trainer.compute(make_batch(), LOGPROBS)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    measured = trainer.live_bytes(part)
    allocated = torch.cuda.memory_allocated()
    trainer.offload({part})
    assert trainer.live_bytes(part) == 0
    assert allocated - torch.cuda.memory_allocated() >= measured > 0
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert kept == torch.cuda.memory_stats()["inactive_split_bytes.all.current"], "a block is kept that is empty"
    trainer.onload({part})
    assert trainer.live_bytes(part) == measured
    assert torch.cuda.memory_allocated() >= allocated


def test_weights_that_are_kept_on_the_host_take_no_device_memory(on_gpu: Callable[..., FSDPTrainer]) -> None:
    whole = on_gpu().live_bytes("weights")
    trainer = on_gpu(cpu_offload=True)
    assert trainer.live_bytes("weights") < 0.1 * whole, "buffers only"
    trainer.offload({"weights", "optimizer"})
    trainer.onload({"weights", "optimizer"})
