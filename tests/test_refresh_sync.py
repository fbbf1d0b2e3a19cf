"""A trainer that follows another by weight sync: the same bits as over a disk, in the memory of a bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource
from chatlearn_core.runtime.plan import BackendPlan, Refresh, RolePlan, RunPlan, WeightRoute
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_local.options import LocalRuntimeOptions
from chatlearn_local.runtime import LocalRuntime

pytestmark = pytest.mark.engine

BUCKET_BYTES = 1 << 19


class LiveBytes(TorchDispatchMode):
    """Bytes of the memory that operations of a thread have taken and not given back, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {memory._cdata for memory in _memory((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        self._live = {key: (memory, size) for key, (memory, size) in self._live.items() if not memory.expired()}
        for memory in _memory(made):
            if memory._cdata not in given:
                self._live[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return made


def _memory(values: Any) -> list[torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Two of one architecture, of about 1.8 MB each, and a third of another."""
    folder = tmp_path_factory.mktemp("models")
    policy = build_tiny_model(folder / "policy", "qwen3", hidden=128, layers=4)
    other = build_tiny_model(folder / "other", "qwen3", hidden=64, layers=1)
    follower = folder / "follower"
    follower.mkdir()
    for file in policy.iterdir():
        (follower / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(policy / "model.safetensors")
    own = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(own, follower / "model.safetensors", metadata={"format": "pt"})
    return str(policy), str(follower), str(other)


@pytest.fixture
def running(chatlearn_registry: PluginRegistry, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def run(policy: str, follower: str, transport: str, decay: float) -> AsyncIterator[LocalRuntime]:
        registry = chatlearn_registry
        trainer = registry.select("trainer", "fsdp")
        record = registry.select("weight_sync", transport)
        route = WeightRoute(
            "policy", "reference", record, registry.load_options(record)(), "test", "barrier", BUCKET_BYTES, 60.0
        )
        roles = {}
        for name, path in (("policy", policy), ("reference", follower)):
            options = registry.load_options(trainer)(param_dtype="float32", num_threads=1)
            backend = BackendPlan(f"roles.{name}", trainer, options)
            source = ModelSource(path, path)
            roles[name] = RolePlan(name, "trainer", (backend,), source, "lm", "cpu", 1, 1, False, {}, 60.0)
        roles["reference"] = replace(roles["reference"], refresh=Refresh("policy", 1, decay, route))
        runtime = LocalRuntime(LocalRuntimeOptions(), RunPlan(registry, roles, (), tmp_path, 0))
        try:
            await runtime.start()
            yield runtime
        finally:
            await runtime.close()

    return run


def backend(runtime: LocalRuntime, role: str) -> FSDPTrainer:
    trainer = runtime.trainer(role).trainer
    assert isinstance(trainer, FSDPTrainer)
    return trainer


def weights(runtime: LocalRuntime, role: str) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.detach().clone() for shard in backend(runtime, role).weights()}


def learn(runtime: LocalRuntime, seed: int) -> None:
    """Other weights, in place, as an optimizer step leaves them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for shard in backend(runtime, "policy").weights():
            shard.tensor.add_(torch.randn(shard.tensor.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize("transport", ["direct", "shared_memory", "broadcast", "delta", "checkpoint"])
async def test_a_reference_is_the_policy_bit_for_bit(running: Any, models: Any, transport: str) -> None:
    async with running(*models[:2], transport, 0.0) as runtime:
        for step in (1, 2):
            learn(runtime, step)
            assert await runtime.refresh_weights("policy", "reference", step)
            policy, reference = weights(runtime, "policy"), weights(runtime, "reference")
            assert all(torch.equal(reference[name], tensor) for name, tensor in policy.items())
        learn(runtime, 3)
        assert any(not torch.equal(weights(runtime, "policy")[name], kept) for name, kept in reference.items())
        assert all(torch.equal(weights(runtime, "reference")[name], kept) for name, kept in reference.items()), (
            "no memory of the policy's is kept"
        )


async def test_an_average_is_its_closed_form_and_that_of_a_model_directory(
    running: Any, models: Any, tmp_path: Path
) -> None:
    decay, rounds = 0.9, 3
    async with running(*models[:2], "direct", decay) as runtime:
        start = {name: tensor.double() for name, tensor in weights(runtime, "reference").items()}
        policies = []
        for step in range(1, rounds + 1):
            learn(runtime, step)
            policies.append(weights(runtime, "policy"))
            await runtime.trainer("policy").export_model(tmp_path / f"{step}")
            assert await runtime.refresh_weights("policy", "reference", step)
        by_sync = weights(runtime, "reference")
    for name, tensor in by_sync.items():
        expected = decay**rounds * start[name]
        for age, policy in enumerate(reversed(policies)):
            expected += (1 - decay) * decay**age * policy[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6, msg=name)
    async with running(*models[:2], "direct", decay) as runtime:
        for step in range(1, rounds + 1):
            await runtime.trainer("reference").load_model(tmp_path / f"{step}", decay=decay)
        by_directory = weights(runtime, "reference")
    assert all(torch.equal(by_directory[name], tensor) for name, tensor in by_sync.items())


@pytest.mark.parametrize("transport", ["direct", "broadcast", "checkpoint"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
async def test_each_end_of_a_refresh_takes_no_more_memory_than_a_bucket(
    running: Any, models: Any, transport: str, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads are measured: the sender's, and the event loop's, where weights are placed."""
    async with running(*models[:2], transport, decay) as runtime:
        total = sum(tensor.nbytes for tensor in weights(runtime, "policy").values())
        assert total > 3 * BUCKET_BYTES, "so that a copy of the model would be seen"
        sender = runtime._transfers["policy", "reference"]._senders.sender
        send, sent = sender.send, LiveBytes()

        def measured(*arguments: Any) -> int:
            with sent:
                return send(*arguments)

        monkeypatch.setattr(sender, "send", measured)
        with LiveBytes() as taken:
            assert await runtime.refresh_weights("policy", "reference", 1)
        assert taken.most <= BUCKET_BYTES
        assert sent.most <= BUCKET_BYTES


async def test_another_model_is_refused_and_nothing_changes(running: Any, models: Any) -> None:
    async with running(models[0], models[2], "direct", 0.5) as runtime:
        before = weights(runtime, "reference")
        with pytest.raises(WeightSyncError, match=r"role 'policy' and role 'reference'.*hold different models"):
            await runtime.refresh_weights("policy", "reference", 1)
        assert all(torch.equal(weights(runtime, "reference")[name], tensor) for name, tensor in before.items())
        assert backend(runtime, "reference").health() is None


async def test_a_sender_that_fails_midway_leaves_the_follower_broken_until_it_loads(
    running: Any, models: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with running(*models[:2], "direct", 0.5) as runtime:
        policy = backend(runtime, "policy")
        await runtime.trainer("reference").export_model(tmp_path / "own")
        stream = policy.weights

        def cut_short(*arguments: Any) -> Any:
            for number, shard in enumerate(stream(*arguments)):
                if number == 20:
                    raise RuntimeError("out of memory")
                yield shard

        monkeypatch.setattr(policy, "weights", cut_short)
        with pytest.raises(
            WeightSyncError, match=r"(?s)role 'reference' from role 'policy' after step 3.*out of memory"
        ):
            await runtime.refresh_weights("policy", "reference", 3)
        assert "out of memory" in str(backend(runtime, "reference").health())
        await runtime.trainer("reference").load_model(tmp_path / "own")
        assert backend(runtime, "reference").health() is None
        monkeypatch.undo()
        assert await runtime.refresh_weights("policy", "reference", 4)


async def test_a_model_that_takes_no_tensors_goes_by_its_directory(
    running: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FSDPTrainer, "weight_loader", lambda trainer, decay: None)
    async with running(*models[:2], "direct", 0.5) as runtime:
        assert not await runtime.refresh_weights("policy", "reference", 1)
