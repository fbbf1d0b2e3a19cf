from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import TensorPlace, TensorSpec, WeightManifest
from chatlearn_generator_kit.incoming_weights import (
    IncomingWeights,
    checkpoint_headers,
    names_tied_to,
    read_checkpoint,
    require_ready,
)


def manifest(*names: str, aliases: dict[str, str] | None = None, dtype: str = "float32", **fields) -> WeightManifest:
    return WeightManifest({name: TensorSpec(name, (2, 3), dtype) for name in names}, aliases or {}, **fields)


TIED = {"head": "embed"}
EXPECTED = manifest("embed", "norm", aliases=TIED)


@pytest.fixture
def incoming() -> IncomingWeights:
    return IncomingWeights("the replica", EXPECTED)


def tensor(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(2, 3, dtype=dtype)


def test_a_whole_sync_passes_and_closes(incoming) -> None:
    incoming.begin(4, EXPECTED)
    assert incoming.version == 4
    assert [name for name, _ in incoming.checked([("norm", tensor())])] == ["norm"]
    assert incoming.check_specs([TensorSpec("embed", (2, 3), "float32")])[0].name == "embed"
    assert incoming.num_arrived == 2
    assert incoming.finish() == 4
    assert incoming.version is None


def test_a_manifest_that_does_not_fit_changes_nothing(incoming) -> None:
    with pytest.raises(
        WeightSyncError, match=r"the replica cannot take policy version 1: 2 tensors differ(.|\n)*extra"
    ):
        incoming.begin(1, manifest("embed", "extra", aliases=TIED))
    with pytest.raises(WeightSyncError, match=r"dtype may differ with .* sync_dtype: convert"):
        incoming.begin(1, manifest("embed", "norm", dtype="bfloat16"))
    assert incoming.version is None
    IncomingWeights("r", EXPECTED, sync_dtype="convert").begin(1, manifest("embed", "norm", dtype="bfloat16"))


def test_float32_is_rounded_to_bfloat16_and_to_nothing_else() -> None:
    offered = manifest("embed", "norm")
    needed = manifest("embed", "norm", dtype="bfloat16", aliases=TIED)
    IncomingWeights("r", needed, sync_dtype="auto").begin(1, manifest("embed", "norm", dtype="bfloat16"))
    rounding = IncomingWeights("r", needed, sync_dtype="auto")
    rounding.begin(1, offered)
    assert [name for name, _ in rounding.checked([("norm", tensor()), ("embed", tensor())])] == ["norm", "embed"]
    assert rounding.finish() == 1
    for offer, want in (("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")):
        with pytest.raises(WeightSyncError, match=f"dtype {offer} offered, {want} expected"):
            IncomingWeights("r", manifest("embed", "norm", dtype=want), sync_dtype="auto").begin(
                1, manifest("embed", "norm", dtype=offer)
            )
    with pytest.raises(WeightSyncError, match="dtype float32 offered, bfloat16 expected"):
        IncomingWeights("r", needed, sync_dtype="exact").begin(1, offered)


@pytest.mark.parametrize(
    ("arrives", "message"),
    [
        (("typo", tensor()), "typo: arrived, but the manifest did not announce it"),
        (("norm", torch.ones(3, 2)), r"norm: shape \[3, 2\] arrived, \[2, 3\] announced"),
        (("norm", tensor(torch.float16)), "norm: dtype float16 arrived, float32 announced"),
    ],
)
def test_unannounced_tensors_are_refused(incoming, arrives, message) -> None:
    incoming.begin(1, EXPECTED)
    with pytest.raises(WeightSyncError, match=message):
        list(incoming.checked([arrives]))


def test_a_tensor_arrives_once_and_a_tied_one_under_either_name(incoming) -> None:
    incoming.begin(1, manifest("head", "norm", aliases={"embed": "head"}))
    assert [name for name, _ in incoming.checked([("head", tensor())])] == ["embed"]
    with pytest.raises(WeightSyncError, match="embed: arrived twice"):
        list(incoming.checked([("head", tensor())]))


def test_a_tied_tensor_under_both_names_counts_once(incoming) -> None:
    incoming.begin(1, manifest("embed", "head", "norm"))
    names = [name for name, _ in incoming.checked([("head", tensor()), ("embed", tensor()), ("norm", tensor())])]
    assert names == ["embed", "norm"]
    assert incoming.finish() == 1


def test_specs_are_admitted_together_or_not_at_all(incoming) -> None:
    incoming.begin(1, EXPECTED)
    good, bad = TensorSpec("norm", (2, 3), "float32"), TensorSpec("typo", (2, 3), "float32")
    with pytest.raises(WeightSyncError, match="typo"):
        incoming.check_specs([good, bad])
    assert incoming.num_arrived == 0
    assert incoming.check_specs([good]) == [good]


def test_missing_tensors_are_named_and_the_sync_stays_open(incoming) -> None:
    incoming.begin(7, EXPECTED)
    list(incoming.checked([("embed", tensor())]))
    with pytest.raises(
        WeightSyncError, match="1 of 2 tensors of policy version 7 did not arrive: norm; the replica is"
    ):
        incoming.finish()
    assert incoming.version == 7
    incoming.reset()
    with pytest.raises(WeightSyncError, match="finish without begin"):
        incoming.finish()


def test_one_sync_at_a_time(incoming) -> None:
    incoming.begin(1, EXPECTED)
    with pytest.raises(WeightSyncError, match="is loading version 1; finish or fail it before version 2"):
        incoming.begin(2, EXPECTED)


def test_an_adapter_manifest_defines_what_must_arrive(incoming) -> None:
    incoming.begin(3, manifest("lora_A", "lora_B", adapter={"r": 2}))
    list(incoming.checked([("lora_A", tensor()), ("lora_B", tensor())]))
    assert incoming.finish() == 3


def test_a_checkpoint_is_read_by_name_and_a_damaged_one_is_named(tmp_path) -> None:
    save_file({"a": tensor()}, tmp_path / "model.safetensors")
    assert [(name, t.shape) for name, t in read_checkpoint(tmp_path)] == [("a", (2, 3))]
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(WeightSyncError, match=r"model\.safetensors is truncated or not a safetensors file"):
        list(read_checkpoint(tmp_path))
    with pytest.raises(WeightSyncError, match=r"cannot be read: .*has no weights"):
        list(read_checkpoint(tmp_path / ".."))


def test_an_engine_receives_plain_values_under_its_own_names(incoming) -> None:
    incoming.begin(0, manifest("head", "norm", aliases={"embed": "head"}))
    specs = [TensorSpec("head", (2, 3), "float32"), TensorSpec("norm", (2, 3), "float32")]
    places = [TensorPlace(spec, offset) for spec, offset in zip(specs, (0, 64), strict=True)]
    assert incoming.check_places(places) == [("embed", "float32", [2, 3], 0), ("norm", "float32", [2, 3], 64)]


def test_a_broadcast_is_received_whole_and_second_names_are_discarded(incoming) -> None:
    incoming.begin(0, manifest("embed", "head", "norm"))
    specs = [TensorSpec(name, (2, 3), "float32") for name in ("head", "embed", "norm")]
    assert incoming.check_broadcast(specs) == [
        ("", "float32", [2, 3]),
        ("embed", "float32", [2, 3]),
        ("norm", "float32", [2, 3]),
    ]


def test_a_checkpoint_is_checked_by_its_headers(incoming, tmp_path) -> None:
    save_file({"embed": tensor(), "norm": tensor(torch.bfloat16)}, tmp_path / "model.safetensors")
    [(file, specs)] = checkpoint_headers(tmp_path)
    assert file == tmp_path / "model.safetensors"
    assert sorted((spec.name, spec.shape, spec.dtype) for spec in specs) == [
        ("embed", (2, 3), "float32"),
        ("norm", (2, 3), "bfloat16"),
    ]
    incoming.begin(0, EXPECTED)
    with pytest.raises(WeightSyncError, match="norm: dtype bfloat16 arrived, float32 announced"):
        incoming.check_checkpoint(tmp_path)
    save_file({"embed": tensor(), "norm": tensor()}, tmp_path / "model.safetensors")
    [(path, pairs)] = incoming.check_checkpoint(tmp_path)
    assert (path, sorted(pairs)) == (str(file), [("embed", "embed"), ("norm", "norm")])
    assert incoming.finish() == 0


def test_second_names_are_listed_by_the_first() -> None:
    tied = manifest("a", "b", aliases={"x": "a", "y": "b", "z": "a"})
    assert names_tied_to(tied) == {"a": ["x", "z"], "b": ["y"]}


@pytest.mark.parametrize(
    ("dead", "offloaded", "message"),
    [(True, False, "the replica is dead; restart it before the sync of version 3"), (False, True, "onload 'weights'")],
)
def test_a_replica_that_cannot_load_is_refused(dead: bool, offloaded: bool, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        require_ready(SimpleNamespace(name="the replica", is_dead=dead, weights_are_offloaded=offloaded), 3)
    require_ready(SimpleNamespace(name="the replica", is_dead=False, weights_are_offloaded=False), 3)
