"""What frozen models computed is kept by content: never read for other content, never computed twice."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from chatlearn_algorithms.example_kinds import Preferences
from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import BackendError, CheckpointError, ConfigError, DataError, FlowError
from chatlearn_core.executor import cached_calls
from chatlearn_core.executor.cached_calls import (
    CachedCalls,
    cached_nodes,
    check_cached,
    kept_roles,
    reading_graph,
)
from chatlearn_core.executor.output_cache import FILE, OutputCache, entry_key, model_identity
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import Graph, trace
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.records import TrainerSpec
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.data_store import PlainData
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan
from chatlearn_core.types import (
    Answer,
    ExampleDraw,
    Media,
    OutputRequest,
    Preference,
    Prompt,
    Sample,
    SamplingParams,
    TrainBatch,
)
from chatlearn_testing.fakes.fleet_completions import FleetCompletions

SAMPLING = SamplingParams(max_tokens=1, temperature=0.5)
ASKED = OutputRequest(frozenset({"logprobs"}), 1.0)
CONFIG = RunConfig.model_validate(
    {
        "model": {"path": "none"},
        "data": {"train": [{"path": "none"}]},
        "algorithm": {"name": "dpo"},
        "roles": {"trainer": {"kind": "trainer", "backend": "fsdp"}},
        "train": {"steps": 1, "prompts_per_step": 1},
    }
)


class Options(BaseModel):
    precision: str = "float32"
    budget: int = 8


def role_of(directory: Path, **options: Any) -> RolePlan:
    record = TrainerSpec(
        name="sums",
        factory="none:none",
        options="none:none",
        heads=frozenset({"lm"}),
        outputs=frozenset({"logprobs"}),
        exports=frozenset({"full_tensors"}),
        layout_options=("budget",),
    )
    backend = BackendPlan("roles.reference", record, Options(**options))
    model = ModelSource(str(directory), str(directory))
    return RolePlan("reference", "trainer", (backend,), model, "lm", "cpu", 1, 1, False, {}, timeout_s=60.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"layers": 2}')
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> OutputCache:
    return OutputCache(tmp_path)


def pair(number: int) -> ExampleDraw:
    """Token t of a completion is 10 * number + t."""
    answers = tuple(Answer(np.arange(10 * number, 10 * number + length)) for length in (3, 2))
    return ExampleDraw(
        Preference(Prompt(f"p{number}", np.array([1, 2]), "?"), answers, ranks=(1.0, 0.0)), 0, f"p{number}"
    )


def samples_of(*numbers: int) -> list[Sample]:
    return [sample for number in numbers for sample in Preferences().samples(pair(number))]


def flow(pairs: Any, m: Any) -> Any:
    return m.join(pairs, m.reference.logprobs(pairs, temperature=1.0, cache=True), m.trainer.logprobs(pairs))


GRAPH = trace(flow, {"reference": "trainer", "trainer": "trainer"}, given="preferences")


class Runtime:
    """Logprobs are minus the token id, halved by temperature; counts the sequences it computed."""

    data = PlainData()

    def __init__(self) -> None:
        self.computed: list[tuple[str, int]] = []

    def trainer(self, role: str) -> Any:
        runtime = self

        class Group:
            async def compute(self, batch: TrainBatch, request: OutputRequest) -> dict[str, torch.Tensor]:
                runtime.computed.append((role, batch.num_sequences))
                values = -batch.token_ids.float() / request.temperature
                return {"logprobs": torch.where(batch.loss_mask, values, 0.0)}

        return Group()


def fill(calls: CachedCalls, runtime: Runtime, samples: list[Sample]) -> None:
    [node] = cached_nodes(GRAPH)
    asyncio.run(calls.fill(runtime, calls.missing([(node, SAMPLING, samples)])))  # type: ignore[arg-type]


def run_reading(calls: CachedCalls, runtime: Any, *numbers: int) -> list[Sample]:
    graph = reading_graph(GRAPH, {"reference"})
    scheduler = FlowScheduler(graph, runtime, FleetCompletions(runtime), sampling=SAMPLING, cached=calls)
    draws = [pair(number) for number in numbers]
    requests = make_requests(draws, 1, SAMPLING, 0, kind=Preferences())
    return asyncio.run(scheduler.run(requests, Timers()))


def test_what_is_read_is_what_was_computed(cache: OutputCache, model: Path) -> None:
    calls, runtime = CachedCalls(cache, {"reference": role_of(model)}), Runtime()
    fill(calls, runtime, samples_of(1, 2, 3))
    assert runtime.computed == [("reference", 6)]
    found = run_reading(calls, runtime, 2, 1)
    assert [name for name, _ in runtime.computed] == ["reference", "trainer"]
    for sample in found:
        expected = np.where(sample.loss_mask, -sample.token_ids, 0)
        np.testing.assert_array_equal(sample.token_data["reference_logprobs"], expected)
        np.testing.assert_array_equal(sample.token_data["trainer_logprobs"], 2 * expected)


def test_another_process_computes_only_what_is_new(tmp_path: Path, model: Path) -> None:
    roles = {"reference": role_of(model)}
    first = CachedCalls(OutputCache(tmp_path), roles)
    fill(first, Runtime(), samples_of(1, 2))
    first.cache.close()
    again, runtime = CachedCalls(OutputCache(tmp_path), roles), Runtime()
    [node] = cached_nodes(GRAPH)
    assert again.missing([(node, SAMPLING, samples_of(1, 2, 1))]) == []
    fill(again, runtime, samples_of(2, 3))
    assert runtime.computed == [("reference", 2)]


def test_a_kill_costs_one_chunk(cache: OutputCache, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_calls, "CHUNK_TOKENS", 9)
    calls = CachedCalls(cache, {"reference": role_of(model)})

    class Dying(Runtime):
        def trainer(self, role: str) -> Any:
            if len(self.computed) == 2:
                raise BackendError("killed")
            return super().trainer(role)

    with pytest.raises(BackendError, match="killed"):
        fill(calls, Dying(), samples_of(1, 2, 3))
    runtime = Runtime()
    fill(calls, runtime, samples_of(1, 2, 3))
    assert sum(count for _, count in runtime.computed) == 4  # of 6: two chunks of one sequence were written


@pytest.mark.parametrize(
    "changed",
    [
        lambda s: replace(s, token_ids=s.token_ids + 1),
        lambda s: replace(s, loss_mask=~s.loss_mask),
        lambda s: replace(s, token_ids=s.token_ids[:-1], loss_mask=s.loss_mask[:-1]),
        lambda s: replace(s, media=(Media("image", b"png"),)),
    ],
)
def test_other_content_has_another_key(changed: Any) -> None:
    [sample, *_] = samples_of(1)
    assert entry_key(b"m", ASKED, changed(sample)) != entry_key(b"m", ASKED, sample)


def test_the_key_is_of_model_and_request_and_not_of_the_id() -> None:
    [sample, *_] = samples_of(1)
    key = entry_key(b"m", ASKED, sample)
    assert entry_key(b"m", ASKED, replace(sample, id="other", group_id="other@7")) == key
    assert entry_key(b"n", ASKED, sample) != key
    assert entry_key(b"m", replace(ASKED, temperature=0.7), sample) != key
    assert entry_key(b"m", replace(ASKED, names=frozenset({"entropy"})), sample) != key
    assert entry_key(b"m", replace(ASKED, arguments={"k": 2}), sample) != key


def test_media_by_reference_is_refused() -> None:
    [sample, *_] = samples_of(1)
    with pytest.raises(DataError, match="what a path or URL names may change"):
        entry_key(b"m", ASKED, replace(sample, media=(Media("image", "photo.png"),)))


def rewrite_weights(model: Path) -> None:
    """Other bytes, of the same number, with the time of the old ones."""
    file = model / "model.safetensors"
    facts = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        rewrite_weights,
        lambda model: (model / "config.json").write_text('{"layers": 3}'),
        lambda model: (model / "model-2.safetensors").write_bytes(b"more"),
    ],
)
def test_another_model_has_another_identity(cache: OutputCache, model: Path, change: Any) -> None:
    before = model_identity(cache, role_of(model))
    assert model_identity(cache, role_of(model)) == before
    change(model)
    assert model_identity(cache, role_of(model)) != before


def test_options_count_and_layout_and_place_do_not(cache: OutputCache, model: Path, tmp_path: Path) -> None:
    before = model_identity(cache, role_of(model))
    assert model_identity(cache, role_of(model, precision="bfloat16")) != before
    assert model_identity(cache, role_of(model, budget=99)) == before
    moved = tmp_path / "moved"
    model.rename(moved)
    assert model_identity(cache, role_of(moved)) == before


def test_a_damaged_file_says_what_to_do(cache: OutputCache, model: Path) -> None:
    calls = CachedCalls(cache, {"reference": role_of(model)})
    fill(calls, Runtime(), samples_of(1))
    cache.close()
    cache.path.write_bytes(b"not a database" * 1000)
    with pytest.raises(CheckpointError, match=rf"{FILE}.*delete the file: its content is computed again"):
        run_reading(CachedCalls(cache, calls.roles), Runtime(), 1)
    cache.close()


def test_an_entry_of_another_length_is_damage(cache: OutputCache, model: Path) -> None:
    calls = CachedCalls(cache, {"reference": role_of(model)})
    fill(calls, Runtime(), samples_of(1))
    with sqlite3.connect(cache.path) as connection:
        connection.execute("UPDATE outputs SET data = x'00'")
    connection.close()
    with pytest.raises(CheckpointError, match="cannot be used: ValueError"):
        run_reading(calls, Runtime(), 1)


def test_what_nobody_computed_is_an_error_with_a_remedy(cache: OutputCache, model: Path) -> None:
    calls = CachedCalls(cache, {"reference": role_of(model)})
    fill(calls, Runtime(), samples_of(1))
    with pytest.raises(BackendError, match=r"has no reference_logprobs of sample 'p2@0#0'.*cache_reference to false"):
        run_reading(calls, Runtime(), 2)


def test_a_role_whose_calls_are_all_kept_is_done_without(model: Path, tmp_path: Path) -> None:
    roles = {"reference": role_of(model), "trainer": replace(role_of(model), name="trainer")}
    plan = RunPlan(None, roles, (), tmp_path, 0)  # type: ignore[arg-type]  # no plugin is asked
    kept = kept_roles(plan, GRAPH, None, snapshots={})
    assert set(kept) == {"reference"}
    graph = reading_graph(GRAPH, kept)
    assert ([node.kind for node in graph.nodes], set(graph.roles)) == (["cache", "trainer"], {"trainer"})
    called = traced(lambda pairs, m: m.join(pairs, m.reference.logprobs(pairs), m.trainer.logprobs(pairs)))
    assert kept_roles(plan, GRAPH, called, snapshots={}) == {}


def test_a_hub_id_is_kept_by_the_files_of_its_commit(cache: OutputCache, model: Path, tmp_path: Path) -> None:
    away = role_of(Path("organisation/model"))
    plan = RunPlan(None, {"reference": away}, (), tmp_path, 0)  # type: ignore[arg-type]  # no plugin is asked
    assert kept_roles(plan, GRAPH, snapshots={"reference": None}) == {}
    [kept] = kept_roles(plan, GRAPH, snapshots={"reference": str(model)}).values()
    assert kept.model is not None
    assert kept.model.path == str(model)  # loads these files, wherever the hub id points by then
    assert model_identity(cache, kept) == model_identity(cache, role_of(model))
    revised = replace(plan, roles={"reference": replace(away, engine={"revision": "other"})})
    assert kept_roles(revised, GRAPH, snapshots={"reference": str(model)}) == {}


def traced(function: Any, given: str | None = "preferences") -> Graph:
    kinds = {"reference": "trainer", "trainer": "trainer", "generator": "generator"}
    return trace(function, kinds, given=given)


def test_a_role_that_changes_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match=r"the weights of role 'reference' change.*cache_reference to false"):
        check_cached(CONFIG, GRAPH, ("trainer", "reference"))


def test_samples_of_a_generator_cannot_be_kept() -> None:
    def sampled(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.join(samples, m.reference.logprobs(samples, cache=True))

    with pytest.raises(FlowError, match=r"results are kept of the flow's own input alone.*Leave cache out"):
        check_cached(CONFIG, traced(sampled, None), ())


def test_without_a_cache_the_call_is_made(cache: OutputCache) -> None:
    runtime: Any = Runtime()
    requests = make_requests([pair(1)], 1, SAMPLING, 0, kind=Preferences())
    scheduler = FlowScheduler(GRAPH, runtime, FleetCompletions(runtime), sampling=SAMPLING)
    [first, _] = asyncio.run(scheduler.run(requests, Timers()))
    assert sorted(runtime.computed) == [("reference", 2), ("trainer", 2)]
    assert first.token_data["reference_logprobs"].tolist() == [0, 0, -10, -11, -12]
