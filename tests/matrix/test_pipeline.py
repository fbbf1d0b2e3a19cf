"""A trainer over pipeline stages, through both runtimes, into a real generator: nothing is gathered on the way.

Loss and outputs come from the last stage alone, the manifest from rank 0, metrics and checkpoint files from whichever
ranks have some; weights travel as boxes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_stand import _demonstrations, _request, decided_prompts

from chatlearn_algorithms.sft import SFTLoss
from chatlearn_core.exceptions import ModelError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.plugins.compatibility import shared_way
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec, WeightSyncSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan, WeightRoute
from chatlearn_core.types import OutputRequest
from chatlearn_hf.plain_forward import load_plain_model
from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
LOGPROBS = OutputRequest(frozenset({"logprobs"}))
TOLERANCE = 1e-5
"""Of logprobs, nats, float32 against a plain transformers forward."""


@pytest.fixture
def plugins(fake_environment: Any) -> PluginRegistry:
    """What is installed, and the trainer over stages as a distribution that workers find too."""
    fake_environment.install(
        "pipeline-probe", entry_points="[chatlearn]\npipeline_probe = chatlearn_testing.fakes.plugin\n"
    )
    return discover_plugins()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four layers, untied, few enough prompts to be undecided."""
    return build_tiny_model(
        tmp_path / "model", "llama", tie=False, initializer_range=0.2, max_length=128, num_hidden_layers=4
    )


class Built:
    """A runtime with the trainer over stages and two replicas of the generator, and an event loop to drive them."""

    def __init__(
        self,
        registry: PluginRegistry,
        runtime: str,
        ranks: int,
        model: Path,
        folder: Path,
        trainer: str,
        **options: Any,
    ) -> None:
        self.registry = registry
        self.trainer = trainer
        self.loop = asyncio.new_event_loop()
        roles = [
            self._role("policy", "trainer", trainer, model, ranks=ranks, learning_rate=0.02, **options),
            self._role("sampler", "generator", "transformers", model, replicas=2),
        ]
        plan = RunPlan(registry, {role.name: role for role in roles}, (), folder, seed=0)
        record = registry.select("runtime", runtime)
        self.runtime: Any = registry.load_factory(record)(registry.load_options(record)(num_threads=1), plan)

    def _role(
        self, name: str, kind: Any, backend: str, model: Path, *, ranks: int = 1, replicas: int = 1, **options: object
    ) -> RolePlan:
        record: Any = self.registry.select(kind, backend, installed=None)
        made = BackendPlan(f"roles.{name}", record, self.registry.load_options(record)(**options))
        source = ModelSource(str(model), str(model), max_length=128)
        return RolePlan(name, kind, (made,), source, "lm", "cpu", replicas, ranks, kind == "trainer", {}, 120.0)

    def route(self, transport: str, placement: Any) -> WeightRoute:
        """By the way that the three records share."""
        record = self.registry.select("weight_sync", transport)
        trainer = self.registry.select("trainer", self.trainer)
        generator = self.registry.select("generator", "transformers")
        assert isinstance(record, WeightSyncSpec)
        assert isinstance(trainer, TrainerSpec)
        assert isinstance(generator, GeneratorSpec)
        way = shared_way(trainer, generator, record, placement, export="boxes")
        assert way == ("boxes", "boxes")
        options = self.registry.load_options(record)()
        return WeightRoute("policy", "sampler", record, options, "test", "barrier", 64 << 10, 60.0, *way)

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)


@pytest.fixture
def build(plugins: PluginRegistry, model: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[Built] = []

    def start(runtime: str, ranks: int, trainer: str = "fake_pipeline", **options: Any) -> Built:
        built = Built(plugins, runtime, ranks, model, tmp_path / f"run-{len(made)}", trainer, **options)
        made.append(built)
        built.do(built.runtime.start())
        return built

    yield start
    for built in made:
        built.do(built.runtime.close())
        built.loop.close()


def check(built: Built, transports: Sequence[str], folder: Path) -> list[Mapping[str, Any]]:
    """A step, a sync and a comparison for each transport; the steps' metrics."""
    group, loss = built.runtime.trainer("policy"), SFTLoss()
    steps: list[Mapping[str, Any]] = []
    before: list[list[int]] = []
    for version, transport in enumerate(transports, start=1):
        batch = loss.prepare(_demonstrations(version))
        steps.append(built.do(group.update(batch, loss)))
        exported = folder / f"v{version}"
        built.do(group.export_model(exported))
        plain = load_plain_model(exported)
        expected = torch.cat([_logprobs(plain, ids) for ids in batch.token_ids.split(batch.lengths)]) * batch.loss_mask
        found = built.runtime.data.get_tensors(built.do(group.compute(batch, LOGPROBS)))
        torch.testing.assert_close(found["logprobs"], expected, atol=TOLERANCE, rtol=0)
        built.do(built.runtime.connect(built.route(transport, "process" if group_is_local(built) else "host")))
        receipts = built.do(built.runtime.sync_weights("policy", "sampler", version))
        assert [receipt.state for receipt in receipts] == ["serving", "serving"], receipts
        answers = decided_prompts(plain)
        assert list(answers.values()) != before, "an optimizer step that changes no token shows nothing"
        before = list(answers.values())
        for replica in range(2):
            for number, (prompt, tokens) in enumerate(answers.items()):
                request = _request(f"{transport}-{replica}-{number}", prompt, 0.0)
                made = built.do(built.runtime.generator("sampler").generate(request, replica))
                [completion] = built.runtime.data.get_completions([made])
                assert list(completion.token_ids) == tokens, (transport, replica, prompt)
    return steps


def group_is_local(built: Built) -> bool:
    return not hasattr(built.runtime.trainer("policy"), "workers")


@torch.no_grad()
def _logprobs(plain: Any, ids: torch.Tensor) -> torch.Tensor:
    chosen = plain(ids).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])


def test_one_rank_in_this_process(build: Any, tmp_path: Path) -> None:
    """The local runtime has one rank, which is every stage; its boxes are whole tensors."""
    built = build("local", 1)
    [first, second] = check(built, ["shared_memory", "checkpoint"], tmp_path)
    assert {"loss", "grad_norm", "lr"} <= first.keys()
    assert first["loss"] != second["loss"]


@pytest.mark.slow
def test_stages_and_shards_in_processes_of_their_own(build: Any, tmp_path: Path) -> None:
    """Two stages of two shards learn what one rank learns; every transport brings their boxes to the generator."""
    alone = check(build("local", 1), ["shared_memory", "checkpoint", "shared_memory"], tmp_path / "alone")
    built = build("ray", 4, stages=2)
    steps = check(built, ["shared_memory", "broadcast", "checkpoint"], tmp_path / "stages")
    for one, other in zip(alone, steps, strict=True):
        for name in ("loss", "grad_norm", "lr"):
            assert other[name].total == pytest.approx(one[name].total, rel=1e-4), name
            assert other[name].count == one[name].count, f"{name} was counted once for each rank that reports it"
    group = built.runtime.trainer("policy")
    saved = tmp_path / "saved"
    facts = built.do(group.save(saved))
    assert sorted(facts) == ["layout.json", *(f"rank_{rank}.safetensors" for rank in range(4))]
    assert facts == file_facts(saved, facts)
    built.do(group.load(saved))
    manifests = built.do(group.every_rank("manifest", "full"))
    assert [manifest is not None for manifest in manifests] == [True, False, False, False]
    built.do(group.load_model(tmp_path / "alone" / "v1"))
    built.do(group.export_model(tmp_path / "again"))
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "alone" / "v1" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(ModelError, match="holds another model"):
        built.do(group.load_model(build_tiny_model(tmp_path / "other", "llama", tie=False, num_hidden_layers=2)))
    built.do(group.export_model(tmp_path / "unchanged"))
    assert (tmp_path / "unchanged" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_fsdp_sends_its_shards_as_they_are(build: Any, tmp_path: Path) -> None:
    """Two ranks, each with half of the rows: asked for boxes, it gathers nothing, and the generator is the trainer."""
    check(build("ray", 2, "fsdp"), ["shared_memory", "broadcast", "checkpoint"], tmp_path)


@pytest.mark.slow
def test_megatron_sends_the_parts_of_stages_as_they_are(build: Any, tmp_path: Path) -> None:
    """Two stages of two tensor parallel ranks: every transport brings their boxes to the generator."""
    built = build("ray", 4, "megatron", tensor_parallel=2, pipeline_parallel=2)
    check(built, ["shared_memory", "broadcast", "checkpoint"], tmp_path)


@pytest.mark.thorough
def test_zero_3_sends_the_elements_that_each_rank_holds(build: Any, tmp_path: Path) -> None:
    """Two ranks cut flattened tensors in the middle of rows."""
    check(build("ray", 2, "deepspeed", zero_stage=3), ["shared_memory", "broadcast", "checkpoint"], tmp_path)
