"""Every sync is checked, and one that fails leaves the replica dead; the engine records its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from chatlearn_core.exceptions import BackendTimeoutError, HostedCallError, HostedProcessLostError, WeightSyncError
from chatlearn_core.protocols.generator import MemoryHandleLoader, ProcessGroupLoader, WeightLoader
from chatlearn_core.types import GroupRendezvous, MemoryHandle, TensorPlace, TensorSpec, WeightManifest
from chatlearn_generator_kit.weight_loader import EngineWeightLoader, ReplicaWeightLoader
from chatlearn_hosting.engine_side.blocks import MappedBlock

WEIGHTS = {"embed": torch.arange(6.0).view(2, 3), "norm": torch.ones(3)}
EXPECTED = WeightManifest(
    {name: TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in WEIGHTS.items()}, {"head": "embed"}
)


class Replica:
    name = "generator role 'actor' replica 0 (test)"

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.is_dead = False
        self.weights_are_offloaded = False

    async def stop_serving(self) -> None:
        self.log.append("stop")

    async def serve(self, policy_version: int) -> None:
        self.log.append(("serve", policy_version))

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        self.is_dead = True
        self.log.append(("die", reason))


class Loader(ReplicaWeightLoader):
    def __init__(self, replica: Replica, **fields: Any) -> None:
        super().__init__(replica, EXPECTED, sync_dtype="exact", **fields)
        self.loaded: dict[str, Tensor] = {}
        self.fails_with: Exception | None = None

    async def _begin(self, manifest: WeightManifest) -> None:
        self._fail()

    async def _load_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.loaded.update(tensors)
        self._fail()

    async def _finish(self, policy_version: int) -> None:
        self._fail()

    def _fail(self) -> None:
        if self.fails_with is not None:
            raise self.fails_with


@pytest.fixture
def replica() -> Replica:
    return Replica()


async def test_a_whole_sync_serves_the_new_version(replica) -> None:
    loader = Loader(replica)
    assert isinstance(EngineLoader(replica), WeightLoader | MemoryHandleLoader | ProcessGroupLoader)
    assert loader.expected_manifest() is EXPECTED
    await loader.begin(7, EXPECTED)
    await loader.load_tensors(WEIGHTS.items())
    assert await loader.finish() == 7
    assert loader.loaded.keys() == WEIGHTS.keys()
    assert replica.log == ["stop", ("serve", 7)]


async def test_a_refusal_changes_nothing(replica) -> None:
    loader = Loader(replica)
    with pytest.raises(WeightSyncError, match="2 tensors differ"):
        await loader.begin(1, WeightManifest({}))
    with pytest.raises(WeightSyncError, match="serves whole models, but the sync offers a LoRA adapter"):
        await loader.begin(1, WeightManifest({}, adapter={"r": 4}))
    with pytest.raises(WeightSyncError, match="serves LoRA adapters"):
        await Loader(replica, takes_adapters=True).begin(1, EXPECTED)
    with pytest.raises(WeightSyncError, match=r"\(test\) takes whole tensors, not boxes; choose"):
        await EngineLoader(replica).load_boxes([])
    with pytest.raises(WeightSyncError, match="load_tensors without begin"):
        await loader.load_tensors(WEIGHTS.items())
    assert replica.log == []
    replica.weights_are_offloaded = True
    with pytest.raises(WeightSyncError, match="onload 'weights' before version 1"):
        await loader.begin(1, EXPECTED)


@pytest.mark.parametrize("step", ["begin", "load", "finish"])
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConnectionError("peer gone"), WeightSyncError, r"failed after \d of 2 tensors: ConnectionError: peer gone"),
        (WeightSyncError("norm: corrupted"), WeightSyncError, "^norm: corrupted$"),
        (BackendTimeoutError("too late"), BackendTimeoutError, "BackendTimeoutError: too late"),
        (RuntimeError("Timed out waiting 500ms"), BackendTimeoutError, "RuntimeError: Timed out"),
        (HostedProcessLostError("killed; it printed: timed out"), WeightSyncError, "killed; it printed"),
    ],
    ids=["unexpected", "refused", "timeout", "torch's timeout", "lost"],
)
async def test_an_error_during_a_sync_kills_the_replica(replica, step, error, kind, words) -> None:
    loader = Loader(replica)

    async def sync() -> None:
        loader.fails_with = error if step == "begin" else None
        await loader.begin(1, EXPECTED)
        loader.fails_with = error if step == "load" else None
        await loader.load_tensors(WEIGHTS.items())
        loader.fails_with = error if step == "finish" else None
        await loader.finish()

    with pytest.raises(kind, match=words):
        await sync()
    assert replica.log[-1][0] == "die"
    assert str(error) in replica.log[-1][1]
    with pytest.raises(WeightSyncError, match="is dead; restart it before the sync of version 2"):
        await loader.begin(2, EXPECTED)


async def test_a_weight_sync_error_from_an_engine_in_this_process_is_raised_unchanged(replica) -> None:
    loader = Loader(replica)
    await loader.begin(1, EXPECTED)
    loader.fails_with = RuntimeError("the engine's thread failed")
    loader.fails_with.__cause__ = WeightSyncError("norm: shape [4] arrived, [3] announced")
    with pytest.raises(WeightSyncError, match=r"^norm: shape \[4\] arrived"):
        await loader.load_tensors([])


async def test_a_tensor_that_is_missing_kills_the_replica(replica) -> None:
    loader = Loader(replica)
    await loader.begin(1, EXPECTED)
    await loader.load_tensors([("norm", WEIGHTS["norm"])])
    with pytest.raises(WeightSyncError, match="1 of 2 tensors of policy version 1 did not arrive: embed"):
        await loader.finish()
    assert replica.is_dead


class EngineLoader(EngineWeightLoader):
    def __init__(self, replica: Replica, bucket_bytes: int = 1 << 16) -> None:
        super().__init__(
            replica,
            EXPECTED,
            num_ranks=2,
            sync_dtype="exact",
            takes_adapters=False,
            bucket_bytes=bucket_bytes,
        )
        self.calls: list[tuple[str, Any]] = []
        self.blocks: list[dict[str, Tensor]] = []
        self.silent = False

    async def _begin(self, manifest: WeightManifest) -> None:
        self.calls.append(("begin", manifest))

    async def _load(self, source: str, content: Mapping[str, Any]) -> None:
        if self.silent:
            error = HostedCallError("load failed")
            error.text, error.type_name = "Timed out after 500 ms", "RuntimeError"
            raise error
        self.calls.append((source, content))
        if source == "block":
            with MappedBlock(content) as block:
                self.blocks.append({name: tensor.clone() for name, tensor in block.tensors()})

    async def _join(self, rendezvous: Mapping[str, Any]) -> None:
        await self._load("join", rendezvous)

    async def _leave(self, name: str) -> None:
        await self._load("leave", name)

    async def _finish(self, policy_version: int) -> None:
        self.calls.append(("finish", policy_version))


@pytest.mark.parametrize("bucket_bytes", [1 << 16, 24], ids=["one bucket", "a bucket a tensor"])
async def test_tensors_reach_the_ranks_through_shared_memory(replica, bucket_bytes) -> None:
    loader = EngineLoader(replica, bucket_bytes)
    await loader.begin(1, EXPECTED)
    await loader.load_tensors(WEIGHTS.items())
    await loader.finish()
    found = {name: tensor for block in loader.blocks for name, tensor in block.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    assert len(loader.blocks) == (1 if bucket_bytes > 24 else 2)


async def test_a_checkpoint_is_named_and_read_by_the_ranks(replica, tmp_path) -> None:
    save_file(WEIGHTS | {"head": WEIGHTS["embed"].clone()}, tmp_path / "model.safetensors")
    loader = EngineLoader(replica)
    await loader.begin(1, EXPECTED)
    await loader.load_checkpoint(tmp_path)
    [(source, content)] = loader.calls[1:]
    assert source == "checkpoint"
    [(file, pairs)] = content["files"]
    assert file == str(tmp_path / "model.safetensors")
    assert sorted(pairs) in ([("embed", "embed"), ("norm", "norm")], [("head", "embed"), ("norm", "norm")])
    await loader.finish()


async def test_handles_are_passed_on_by_kind(replica) -> None:
    loader = EngineLoader(replica)
    await loader.begin(1, EXPECTED)
    places = tuple(TensorPlace(spec, 64 * i) for i, spec in enumerate(EXPECTED.tensors.values()))
    await loader.load_handles(MemoryHandle("cuda_ipc", {"GPU-1": "rebuilt there"}, 4096, places))
    [(source, content)] = loader.calls[1:]
    assert (source, content["num_bytes"]) == ("cuda_block", 4096)
    assert [name for name, *_ in content["tensors"]] == list(WEIGHTS)


async def test_groups_are_joined_once_and_a_silent_sender_is_named(replica) -> None:
    loader = EngineLoader(replica)
    group = GroupRendezvous("g", "127.0.0.1:9", "gloo", 3, 1, 0.5)
    await loader.join_group(group)
    await loader.join_group(group)
    assert [source for source, _ in loader.calls] == ["join"]
    assert loader.num_group_ranks == 2
    await loader.begin(1, EXPECTED)
    await loader.load_broadcast("g", list(EXPECTED.tensors.values()))
    await loader.finish()
    await loader.begin(2, EXPECTED)
    loader.silent = True
    with pytest.raises(BackendTimeoutError, match=r"rank 0 of the group 'g' at .*:9 sent nothing within 0\.5 s"):
        await loader.load_broadcast("g", list(EXPECTED.tensors.values()))
    with pytest.raises(BackendTimeoutError, match=r"its 2 ranks could not join the sender of the group 'h'"):
        await loader.join_group(GroupRendezvous("h", "127.0.0.1:9", "gloo", 3, 1, 0.5))
    await loader.leave_group("g")
    await loader.leave_group("unknown")


async def test_a_group_that_was_not_joined_is_refused(replica) -> None:
    loader = EngineLoader(replica)
    await loader.begin(1, EXPECTED)
    with pytest.raises(WeightSyncError, match="the group 'g' has not been joined"):
        await loader.load_broadcast("g", [])
    assert replica.is_dead
