"""Real trainer and generator on shared devices: what moves when, that it has really moved, and that nothing changes.

``memory.offload=always`` makes roles take turns on a CPU too. An offloaded part has live tensors of size zero there,
so what the workers measure after each move says whether it took place.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from chatlearn_cli.run import describe
from chatlearn_core.config.load import load_config
from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.executor.assembly import Assembly, assemble
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_transformers.generator import TransformersGenerator
from chatlearn_transformers.weight_loader import TransformersWeightLoader

pytestmark = pytest.mark.engine
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter in "aeiou" for letter in solution_str) / max(1, len(solution_str))
"""
ALWAYS, NEVER = "memory.offload=always", "memory.offload=never"
COLOCATED_STEP = [
    ("offload", "trainer", {"weights"}),
    ("onload", "generator", {"kv_cache"}),
    ("generate", "generator", None),
    ("offload", "generator", {"weights", "kv_cache"}),
    ("onload", "reference", {"weights"}),
    ("logprobs", "reference", None),
    ("offload", "reference", {"weights"}),
    ("onload", "trainer", {"weights"}),
    ("logprobs", "trainer", None),
    ("onload", "trainer", {"gradients", "optimizer"}),
    ("update", "trainer", None),
    ("offload", "trainer", {"gradients", "optimizer"}),
    ("onload", "generator", {"weights"}),
    ("sync", "trainer", None),
]
"""A step with nothing before it but another step."""
START = [
    ("offload", "trainer", {"weights", "gradients", "optimizer"}),
    ("offload", "reference", {"weights"}),
    ("offload", "generator", {"weights", "kv_cache"}),
    ("onload", "trainer", {"weights"}),
    ("onload", "generator", {"weights"}),
    ("sync", "trainer", None),
]
"""Each is put aside before the next is built, and both ends come back for the first weights."""
Entry = Mapping[str, Any]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, sums: Path) -> Path:
    """GRPO with a reference: three steps, a checkpoint at the end."""
    folder = tmp_path_factory.mktemp("sharing")
    (folder / "score.py").write_text(REWARD)
    device = {"device": "cpu"}
    content: dict[str, Any] = {
        "name": "sharing",
        "output_dir": str(folder / "run"),
        "model": {"path": str(tiny_model)},
        "data": {"train": [{"path": str(sums), "format": "prompt"}]},
        "algorithm": {"name": "grpo", "options": {"group_size": 3, "kl_coef": 0.01}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 0.003}, **device},
            "reference": {"kind": "trainer", "backend": "fsdp", **device},
            "generator": {"kind": "generator", "backend": "transformers", **device},
            "reward": {
                "kind": "reward",
                "backend": "function",
                "options": {"path": f"{folder / 'score.py'}:compute_score", "num_workers": 1},
            },
        },
        "sampling": {"max_tokens": 8},
        "train": {"steps": 3, "prompts_per_step": 4, "mini_batches": 2},
        "checkpoint": {"every": 0},
        "runtime": {"options": {"num_threads": 1}},
        "log": {"rollouts": 0, "progress": False},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def assembled(config: Path, name: str, *overrides: str) -> Assembly:
    registry = discover_plugins()
    return assemble(load_config(config, [f"output_dir={config.parent / name}", *overrides], registry), registry)


async def train(config: Path, name: str, *overrides: str, listener: Watcher | None = None) -> Path:
    """Run to the end in this process; returns the run directory."""
    run = Run(assembled(config, name, *overrides), listener=listener)
    if listener is not None:
        listener.run = run
    await run.train("never")
    return config.parent / name


class Watcher(RunListener):
    """Observes every phase, with access to the run."""

    run: Run

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def trace_of(run_dir: Path, step: int, during: str | None = None) -> list[Entry]:
    """What happened in a step itself, or beside it, such as in its checkpoint."""
    entries = lines(run_dir / "trace.jsonl")
    return [entry for entry in entries if entry["step"] == step and entry.get("during") == during]


def told(entries: Iterable[Entry]) -> list[tuple[str, str, set[str] | None]]:
    """(action, role, parts) without the reward, which runs beside it all."""
    return [
        (entry["action"], entry["role"], set(entry["live_bytes"]) if "live_bytes" in entry else None)
        for entry in entries
        if entry["role"] != "reward"
    ]


def result_of(run_dir: Path) -> tuple[bytes, list[dict[str, float]]]:
    """The trained model and the numbers of every step, without times."""
    steps = [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("timing_s/", "perf/", "sync/slowest_replica_s"))
        }
        for line in lines(run_dir / "metrics.jsonl")
    ]
    return (run_dir / "model" / "model.safetensors").read_bytes(), steps


def check_nobody_is_in_the_way(run_dir: Path, *neighbours: set[str]) -> None:
    """While a role works, those that share its devices have nothing live, by what the workers measured last."""
    live: dict[tuple[str, str, str], int] = {}
    working = 0
    for entry in sorted(lines(run_dir / "trace.jsonl"), key=lambda entry: entry["step"]):
        for part, workers in entry.get("live_bytes", {}).items():
            live |= {(entry["role"], part, worker): num_bytes for worker, num_bytes in workers.items()}
        if "live_bytes" in entry or entry["role"] == "reward":
            continue
        roles = {entry["role"], entry.get("to", entry["role"])}
        others = {other for group in neighbours if group & roles for other in group} - roles
        awake = {key: num_bytes for key, num_bytes in live.items() if num_bytes and key[0] in others}
        assert not awake, f"{entry} while {awake}"
        for role in roles:
            assert any(num_bytes for (owner, part, _), num_bytes in live.items() if (owner, part) == (role, "weights"))
        working += 1
    assert working >= 3 * 5


# ------------------------------------------------------------------------------------------------- in one process


@pytest.fixture(scope="module")
def local(config: Path) -> Path:
    """Nothing is offloaded: what all others must equal."""
    return asyncio.run(train(config, "local", NEVER))


async def test_offloading_changes_no_bit_and_follows_the_flow(config: Path, local: Path) -> None:
    taking_turns = await train(config, "turns", ALWAYS)
    assert result_of(taking_turns) == result_of(local)
    assert told(trace_of(taking_turns, 0, "start")) == START
    assert told(trace_of(taking_turns, 2)) == COLOCATED_STEP
    assert told(trace_of(taking_turns, 3)) == COLOCATED_STEP
    check_nobody_is_in_the_way(taking_turns, {"trainer", "generator", "reference"})
    metrics = lines(taking_turns / "metrics.jsonl")[0]
    assert metrics["timing_s/offload"] > 0
    assert metrics["timing_s/onload"] > 0


async def test_an_engine_takes_turns_as_well(config: Path, tmp_path: Path) -> None:
    """vLLM in this process, where it and its neighbours measure what each of them really holds."""
    cache_bytes = 64 << 20
    engine = {"kv_cache_memory_bytes": cache_bytes, "max_num_seqs": 64}
    vllm = [
        f"model.path={build_tiny_model(tmp_path / 'model', hidden=128)}",
        "roles.generator.backend=vllm",
        f"roles.generator.engine={json.dumps(engine)}",
    ]
    staying = await train(config, "vllm-staying", NEVER, *vllm)
    taking_turns = await train(config, "vllm-turns", ALWAYS, *vllm)
    assert result_of(taking_turns) == result_of(staying)
    assert told(trace_of(taking_turns, 2)) == COLOCATED_STEP
    check_nobody_is_in_the_way(taking_turns, {"trainer", "generator", "reference"})
    measured = [entry.get("live_bytes") for entry in trace_of(taking_turns, 2) if entry["role"] == "generator"]
    assert {"kv_cache": {"0": cache_bytes}} in measured


async def test_by_default_roles_on_a_cpu_stay_where_they_are(local: Path) -> None:
    assert [entry["action"] for entry in trace_of(local, 2)].count("logprobs") == 2
    assert not [entry for entry in lines(local / "trace.jsonl") if "live_bytes" in entry]
    assert "timing_s/offload" not in lines(local / "metrics.jsonl")[0]


async def test_while_the_trainer_updates_no_tensor_of_the_others_has_a_size(config: Path) -> None:
    """Looked at in the storages themselves, beside what the backends measure."""
    seen: list[tuple[int, int, int]] = []

    class Looker(Watcher):
        def phase(self, step: int, phase: Phase) -> None:
            if phase == Phase.SYNCING and step > 0:  # the updates are made, nothing has moved since
                runtime: Any = self.run.runtime
                generator = runtime.generator("generator").replicas[0]
                seen.append(
                    (
                        num_bytes(runtime.trainer("trainer").trainer._model.parameters()),
                        num_bytes(runtime.trainer("reference").trainer._model.parameters()),
                        num_bytes(generator._store._model.parameters()) + generator._decoder.cache.num_bytes,
                    )
                )

    await train(config, "looked", ALWAYS, "train.steps=2", listener=Looker())
    assert len(seen) == 2
    assert all(trainer > 0 and reference == generator == 0 for trainer, reference, generator in seen)


async def test_trainers_that_share_nothing_compute_at_the_same_time(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits in its first computation until the other is there too."""
    compute, both = FSDPTrainer.compute, threading.Barrier(2)

    def meet_and_compute(self: FSDPTrainer, batch: Any, request: Any) -> Any:
        both.wait(timeout=60)
        return compute(self, batch, request)

    monkeypatch.setattr(FSDPTrainer, "compute", meet_and_compute)
    run_dir = await train(config, "together", NEVER, "train.steps=1")
    calls = {entry["role"]: entry for entry in trace_of(run_dir, 1) if entry["action"] == "logprobs"}
    assert {entry["level"] for entry in calls.values()} == {1}
    assert calls["reference"]["start_s"] < calls["trainer"]["stop_s"]
    assert calls["trainer"]["start_s"] < calls["reference"]["stop_s"]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def offload_in_name(self: FSDPTrainer, parts: Iterable[Any]) -> None:
    """Mark parts as offloaded and leave them where they are."""
    for part in parts:
        self._parts._parts[part].is_offloaded = True


async def test_a_trainer_that_offloads_in_name_only_ends_the_run(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPTrainer, "offload", offload_in_name)
    with pytest.raises(BackendError, match=r"rank 0: weights were offloaded, but \d+ bytes of them are still live"):
        await train(config, "liar", ALWAYS)


async def test_a_generator_that_is_rebuilt_changes_nothing_and_leaves_room(
    config: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies once while it samples, and once as it takes weights, where its KV cache is to stay away."""
    died: list[str] = []
    versions: list[int] = []
    generate, begin = TransformersGenerator.generate, TransformersWeightLoader.begin
    finish = TransformersWeightLoader.finish

    async def mortal_generate(self: TransformersGenerator, request: Any, on_tokens: Any = None) -> Any:
        if self.policy_version == 1 and not died:
            died.append("sampling")
            await self.die("killed while it samples")
        return await generate(self, request, on_tokens)

    async def counting_begin(self: TransformersWeightLoader, version: int, manifest: Any, *args: Any) -> None:
        versions.append(version)
        await begin(self, version, manifest, *args)

    async def mortal_finish(self: TransformersWeightLoader) -> int:
        generator: Any = self._replica
        if versions[-2:] == [2, 2]:
            died.append(f"rebuilt without its cache: {generator._kv_offloaded}")
        if versions[-1] == 2 and "loading" not in died:
            died.append("loading")
            await generator.die("killed while it loads")
            raise BackendError("killed while it loads")
        return await finish(self)

    monkeypatch.setattr(TransformersGenerator, "generate", mortal_generate)
    monkeypatch.setattr(TransformersWeightLoader, "begin", counting_begin)
    monkeypatch.setattr(TransformersWeightLoader, "finish", mortal_finish)
    mortal = await train(config, "mortal", ALWAYS)
    assert died == ["sampling", "loading", "rebuilt without its cache: True"]
    assert result_of(mortal) == result_of(local)
    check_nobody_is_in_the_way(mortal, {"trainer", "generator", "reference"})


def test_completions_cannot_be_kept_in_a_cache_that_is_released(config: Path) -> None:
    keep = ("rollout.partial=keep", "algorithm.options.importance_correction=truncate")
    with pytest.raises(ConfigError, match=r"KV cache of roles\.generator, .* released for roles\.trainer, roles\.ref"):
        describe(assembled(config, "kept", ALWAYS, *keep))
    describe(assembled(config, "kept", NEVER, *keep))


def test_a_dry_run_says_what_moves_when(config: Path) -> None:
    text = describe(assembled(config, "dry", ALWAYS))
    assert "trainer, reference, generator take turns on cpu" in text
    assert "before trainer.update           onload trainer (gradients, optimizer)" in text
    assert "nothing is moved" in describe(assembled(config, "dry"))


# --------------------------------------------------------------------------------------------------------- on Ray


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    import ray

    quiet = {"log_to_driver": False, "configure_logging": False}
    # A cluster that other tests of this process are in: they may go on with it afterwards.
    joined = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
    ray.shutdown()
    resources = {"num_cpus": 16, "num_gpus": 2, "object_store_memory": 10**8}
    ray.init(address="local", include_dashboard=False, **resources, **quiet)
    yield
    ray.shutdown()
    if joined is not None:
        ray.init(address=joined, **quiet)


def on_ray(pool: Mapping[str, Any], **roles: Mapping[str, Any]) -> list[str]:
    seats = {role: {"pool": "shared", **seat} for role, seat in roles.items()}
    options = {"num_threads": 1, "pools": {"shared": pool}, "roles": seats}
    return ["runtime.backend=ray", f"runtime.options={json.dumps(options)}", ALWAYS]


@pytest.mark.matrix  # the two tests below are in every run
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_session")
async def test_colocated_processes_take_turns(config: Path, local: Path) -> None:
    everybody = on_ray({"slots": 1}, trainer={}, reference={}, generator={})
    colocated = await train(config, "colocated", *everybody)
    assert result_of(colocated) == result_of(local)
    assert told(trace_of(colocated, 2)) == COLOCATED_STEP
    check_nobody_is_in_the_way(colocated, {"trainer", "generator", "reference"})


ON_TWO_GPUS = (
    "memory.offload=auto",
    *(f"roles.{role}.device=auto" for role in ("trainer", "reference", "generator")),
)
"""An engine that drives both GPUs of a slot, beside a trainer on the one and a reference on the other."""


def test_a_dry_run_says_which_gpus_an_engine_shares_with_whom(config: Path) -> None:
    placed = on_ray({"slots": 1, "gpus": 2}, trainer={}, generator={"gpus": 2}, reference={})
    settings = [*placed, *ON_TWO_GPUS, "runtime.options.num_gpus=2"]
    text = describe(assembled(config, "dry", *settings))
    assert "rank 0 of 1: pool 'shared', slot 0: 0.1666 CPU, its GPU 0" in text
    assert "replica 0: pool 'shared', slot 0: 0.3333 CPU, its GPUs 0 and 1" in text
    assert "trainer, generator take turns on pool 'shared', slot 0, GPU 0" in text
    assert "reference, generator take turns on pool 'shared', slot 0, GPU 1" in text
    together = describe(assembled(config, "dry", *settings, "roles.trainer.ranks=2", "roles.reference.ranks=2"))
    for gpu in (0, 1):
        assert f"rank {gpu} of 2: pool 'shared', slot 0: 0.1666 CPU, its GPU {gpu}" in together
    slot = "pool 'shared', slot 0"
    assert f"trainer, reference, generator take turns on {slot}, GPU 0 and 1 more, up to {slot}, GPU 1" in together
    with pytest.raises(
        ConfigError, match=r"'trainer' has 3 worker\(s\) .* needs 2 slots \(2 a slot\), but pool 'shared' has 1"
    ):
        describe(assembled(config, "dry", *settings, "roles.trainer.ranks=3"))


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_session")
async def test_an_engine_on_two_gpus_takes_turns_with_those_on_each(config: Path, local: Path) -> None:
    """Imagined GPUs: the workers compute on the host, and who shares which is what the slot says."""
    placed = on_ray({"slots": 1, "gpus": 2}, trainer={}, generator={"gpus": 2}, reference={})
    shared = await train(config, "two-gpus", *placed, *ON_TWO_GPUS)
    assert result_of(shared) == result_of(local)
    check_nobody_is_in_the_way(shared, {"trainer", "generator"}, {"reference", "generator"})
    moved = [(entry["action"], entry["role"]) for entry in trace_of(shared, 2) if "live_bytes" in entry]
    assert ("offload", "reference") in moved
    assert moved.index(("onload", "reference")) < moved.index(("offload", "reference"))


class Killer(Watcher):
    """Kills the sleeping trainer while the generator is awake, in step 2."""

    killed = False

    def phase(self, step: int, phase: Phase) -> None:
        if (step, phase) == (2, Phase.GENERATING) and not self.killed:
            self.killed = True
            runtime: Any = self.run.runtime
            os.kill(runtime.trainer("trainer").workers[0].facts.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_session")
async def test_partly_shared_processes_take_turns_and_a_lost_trainer_comes_back_to_them(config: Path) -> None:
    """Two generator replicas, one beside the trainer and one beside the reference, which therefore never meet."""
    two = "roles.generator.replicas=2"
    expected = await train(config, "local-two", NEVER, two)
    placed = on_ray({"slots": 2}, trainer={}, generator={}, reference={"first_slot": 1})
    killer = Killer()
    partly = await train(config, "partly", two, *placed, "checkpoint.every=1", listener=killer)
    assert killer.killed
    assert any("The trainer was rebuilt" in text for text in killer.warnings)
    assert result_of(partly) == result_of(expected)
    check_nobody_is_in_the_way(partly, {"trainer", "generator"}, {"reference", "generator"})
    recovery = [entry for entry in told(trace_of(partly, 1, "recovery")) if entry[1] != "reference"]
    assert recovery == [
        ("offload", "trainer", {"gradients"}),
        ("onload", "trainer", {"weights", "optimizer"}),
        ("load", "trainer", None),
        ("offload", "trainer", {"optimizer"}),
        ("onload", "generator", {"weights"}),
        ("sync", "trainer", None),
    ], "the rebuilt trainer is made sure of; the generator had gone when its turn began"
    step = trace_of(partly, 1)
    assert told(entry for entry in step if entry["role"] == "reference") == [
        ("onload", "reference", {"weights"}),
        ("logprobs", "reference", None),
        ("offload", "reference", {"weights"}),
    ], "it leaves when the generator wakes for the sync"
