"""One engine, trainers of several backends and layouts beside it, and every transport that fits between them.

A ``Stand`` starts an engine once. ``Stand.check`` makes three optimizer steps on a trainer, brings the weights to the
generator after each over one transport, and compares what every replica then generates with a plain transformers
forward of the model that the trainer exports.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from chatlearn_algorithms.sft import SFTLoss
from chatlearn_core.plugins.compatibility import mismatches, shared_way
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec, WeightSyncSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan, WeightRoute
from chatlearn_core.types import (
    Completion,
    GenerateRequest,
    Payload,
    Prompt,
    Sample,
    SamplingParams,
    TrainBatch,
    pack_samples,
)
from chatlearn_hf.plain_forward import PlainModel, load_plain_model

GENERATORS = ("transformers", "vllm", "sglang")
NUM_SYNCS = 3
NUM_PROMPTS = 4
NUM_TOKENS = 12
LOGPROB_TOLERANCE = 1e-4
GREEDY_MARGIN = 1e-3
"""A prompt is used where the two likeliest tokens are at least this far apart (log-odds) at every position: nearer ones
may fall either way by rounding."""
_BUCKET_BYTES = 64 << 10
"""Small, so that a tiny model takes several buckets."""


@dataclass(slots=True, frozen=True)
class TrainerLayout:
    """A trainer backend and how it splits the model over its ranks."""

    backend: str
    ranks: int = 1
    name: str = ""
    """Of the layout, where the number of ranks does not say it."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.ranks} rank(s)" + (f" ({self.name})" if self.name else "")

    @property
    def role(self) -> str:
        """Name of the role that trains so."""
        return "_".join(filter(None, ("trainer", self.backend, str(self.ranks), self.name.lower().replace(" ", ""))))


FSDP_1, FSDP_2 = TrainerLayout("fsdp"), TrainerLayout("fsdp", 2)
FSDP_TENSOR_2 = TrainerLayout("fsdp", 2, "TP2", {"tensor_parallel": 2})
TENSOR_2 = TrainerLayout("megatron", 2, "TP2 SP", {"tensor_parallel": 2, "sequence_parallel": True})
PIPELINE_2 = TrainerLayout("megatron", 2, "PP2", {"pipeline_parallel": 2})
EXPERT_2 = TrainerLayout("megatron", 2, "EP2", {"expert_parallel": 2})
ZERO_3 = TrainerLayout("deepspeed", 2, "ZeRO3", {"zero_stage": 3})
TRAINERS = ("fsdp", "megatron", "deepspeed")


@dataclass(slots=True, frozen=True)
class Bench:
    """What one engine start serves."""

    runtime: Literal["local", "ray"]
    generator: str
    tensor_parallel: int
    tied: bool
    replicas: int = 1
    payload: Payload = "full"
    """``adapter``: the trainers train LoRA adapters, and only those travel."""
    data_parallel: int = 1
    """Ranks of the engine that share the experts of a model that has some."""
    trainers: tuple[TrainerLayout, ...] = (FSDP_1, FSDP_2)
    """Those that stand beside the engine."""

    def __str__(self) -> str:
        tying = "tied" if self.tied else "untied"
        adapter = "-adapter" if self.payload == "adapter" else ""
        ranks = f"-dp{self.data_parallel}" if self.data_parallel > 1 else ""
        return f"{self.generator}-tp{self.tensor_parallel}{ranks}-{tying}-{self.runtime}{adapter}"


LOCAL = (FSDP_1,)
ALL_LOCAL = (FSDP_1, TrainerLayout("megatron"), TrainerLayout("deepspeed"))
ALL_LAYOUTS = (FSDP_1, FSDP_2, TENSOR_2, PIPELINE_2, ZERO_3)
PAIRWISE = (
    Bench("local", "transformers", 1, tied=True, replicas=2, trainers=LOCAL),
    Bench("ray", "transformers", 1, tied=False, replicas=2),
    Bench("local", "vllm", 1, tied=True, trainers=LOCAL),
    Bench("ray", "vllm", 2, tied=False),
    Bench("local", "sglang", 1, tied=False, trainers=LOCAL),
    Bench("ray", "sglang", 2, tied=True),
)
"""Every existing pair of engine, number of FSDP ranks, transport, tensor parallelism and tying, in the fewest starts.
"""
OTHER_TRAINERS = (
    Bench("ray", "vllm", 1, tied=True, trainers=(PIPELINE_2, FSDP_TENSOR_2)),
    Bench("ray", "sglang", 1, tied=False, trainers=(ZERO_3,)),
)
"""Layouts whose ranks have parts of layers; `make test-matrix` runs more of them."""


def all_benches() -> Iterator[Bench]:
    """Every engine x tensor parallelism x tying, in one process and over processes."""
    for generator in GENERATORS:
        for tensor_parallel in (1,) if generator == "transformers" else (1, 2):
            for tied in (True, False):
                replicas = 2 if tensor_parallel == 1 else 1
                yield Bench("ray", generator, tensor_parallel, tied, replicas=replicas, trainers=ALL_LAYOUTS)
                if tensor_parallel == 1:
                    yield Bench("local", generator, tensor_parallel, tied, trainers=ALL_LOCAL)


def fitting_transports(registry: PluginRegistry, bench: Bench, backend: str = "fsdp") -> list[WeightSyncSpec]:
    """Transports of this repository that carry weights between these two, as far apart as the runtime puts them."""
    trainer, generator = (
        registry.select("trainer", backend),
        registry.select("generator", bench.generator, installed=None),
    )
    assert isinstance(trainer, TrainerSpec)
    assert isinstance(generator, GeneratorSpec)
    placement = "process" if bench.runtime == "local" else "host"
    return [
        transport
        for transport in registry.records("weight_sync")
        if isinstance(transport, WeightSyncSpec)
        and transport.name in FIRST_PARTY
        and not mismatches(trainer, generator, transport, placement, bench.payload)
    ]


FIRST_PARTY = ("direct", "shared_memory", "broadcast", "checkpoint", "delta")
"""Those that need no GPU."""


class Stand:
    """A runtime with one generator role and a trainer role of each layout.

    Args:
        registry: the installed plugins.
        bench: what to start.
        model: directory of the model that all roles hold.
        workspace: a directory for checkpoints, exports and runs.
    """

    def __init__(self, registry: PluginRegistry, bench: Bench, model: Path, workspace: Path) -> None:
        self.registry = registry
        self.bench = bench
        self.model = model
        self.workspace = workspace
        self.version = 0
        self.runtime: Any = None
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Stand:
        self.runtime = self._build()
        self._loop.run_until_complete(self.runtime.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self.runtime.close())
        self._loop.close()

    def _build(self) -> Any:
        learning: dict[str, Any] = {"learning_rate": 0.02}
        if self.bench.payload == "adapter":
            learning["lora"] = {"rank": 4}
        trainers = [
            self._role(
                layout.role, "trainer", layout.backend, ranks=layout.ranks, options={**learning, **layout.options}
            )
            for layout in self.bench.trainers
        ]
        options, engine = _engine(self.bench)
        generator = self._role(
            "generator",
            "generator",
            self.bench.generator,
            replicas=self.bench.replicas,
            options=options,
            engine=engine,
        )
        roles = {role.name: role for role in (*trainers, generator)}
        plan = RunPlan(self.registry, roles, (), self.workspace, seed=0)
        record = self.registry.select("runtime", self.bench.runtime)
        settings: dict[str, Any] = {"num_threads": 1}
        return self.registry.load_factory(record)(self.registry.load_options(record)(**settings), plan)

    def _role(
        self,
        name: str,
        kind: Any,
        backend: str,
        *,
        ranks: int = 1,
        replicas: int = 1,
        options: Mapping[str, Any],
        engine: Mapping[str, Any] | None = None,
    ) -> RolePlan:
        record: Any = self.registry.select(kind, backend, installed=None)
        return RolePlan(
            name=name,
            kind=kind,
            backends=(BackendPlan(f"roles.{name}", record, self.registry.load_options(record)(**options)),),
            model=ModelSource(str(self.model), str(self.model), max_length=128),
            head="lm",
            device="cpu",
            replicas=replicas,
            ranks=ranks,
            trainable=kind == "trainer",
            engine=dict(engine or {}),
            timeout_s=240.0,
        )

    def check(self, trainer: TrainerLayout, transport: WeightSyncSpec) -> None:
        """Three times: learn, sync, compare. Raises AssertionError where the generator is not the trainer."""
        self._loop.run_until_complete(self._check(trainer, transport))

    async def _check(self, trainer: TrainerLayout, transport: WeightSyncSpec) -> None:
        group = self.runtime.trainer(trainer.role)
        await self.runtime.connect(self._sync_plan(trainer, transport))
        before: list[list[int]] = []
        loss = SFTLoss()
        for sync in range(NUM_SYNCS):
            self.version += 1
            await group.update(loss.prepare(_demonstrations(self.version)), loss)
            exported = self.workspace / f"v{self.version}"
            await group.export_model(exported)
            receipts = await self.runtime.sync_weights(trainer.role, "generator", self.version)
            assert [receipt.state for receipt in receipts] == ["serving"] * self.bench.replicas
            assert {receipt.policy_version for receipt in receipts} == {self.version}
            plain = load_plain_model(exported)
            expected = decided_prompts(plain)
            assert list(expected.values()) != before, "an optimizer step that changes no token shows nothing"
            before = list(expected.values())
            for index, replica in enumerate(self.runtime.generator("generator").replicas):
                where = f"{self.bench}, {trainer.backend} {trainer}, {transport.name}, sync {sync}, replica {index}"
                await self._compare(replica, plain, expected, where)

    async def _compare(
        self, replica: Any, plain: PlainModel, expected: Mapping[tuple[int, ...], list[int]], where: str
    ) -> None:
        greedily, sampled = await asyncio.gather(
            asyncio.gather(*(replica.generate(_request(f"{where}-g{i}", p, 0.0)) for i, p in enumerate(expected))),
            asyncio.gather(*(replica.generate(_request(f"{where}-s{i}", p, 1.0)) for i, p in enumerate(expected))),
        )
        greedily = await self.runtime.data.aget_completions(greedily)
        sampled = await self.runtime.data.aget_completions(sampled)
        for prompt, completion in zip(expected, greedily, strict=True):
            assert completion.token_ids.tolist() == expected[prompt], where
        for prompt, completion in zip(expected, sampled, strict=True):
            logprobs = sequence_logprobs(plain, prompt, completion)
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=LOGPROB_TOLERANCE, rtol=0, err_msg=where)
        for completion in (*greedily, *sampled):
            assert {span.version for span in completion.version_spans} == {self.version}, where
        assert replica.policy_version == self.version, where

    def _sync_plan(self, trainer: TrainerLayout, transport: WeightSyncSpec) -> WeightRoute:
        generator = self.registry.select("generator", self.bench.generator, installed=None)
        assert isinstance(generator, GeneratorSpec)
        record = self.registry.select("trainer", trainer.backend)
        assert isinstance(record, TrainerSpec)
        options = self.registry.load_options(record)(**trainer.options)
        way = shared_way(record, generator, transport, payload=self.bench.payload, options=options)
        assert way is not None
        parts = trainer in (FSDP_TENSOR_2, TENSOR_2, PIPELINE_2, EXPERT_2) and "boxes" in transport.exports
        assert way[0] == ("boxes" if parts else "full_tensors"), "ranks that hold parts send them as they are"
        return WeightRoute(
            trainer=trainer.role,
            target="generator",
            record=transport,
            options=self.registry.load_options(transport)(),
            why="the test names it",
            fleet_rule="barrier",
            bucket_bytes=_BUCKET_BYTES,
            timeout_s=120.0,
            export=way[0],
            channel=way[1],
            payload=self.bench.payload,
        )


def _engine(bench: Bench) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and engine arguments for a small engine in float32."""
    lora: dict[str, Any] = {"lora": {"max_rank": 8}} if bench.payload == "adapter" else {}
    match bench.generator:
        case "vllm":
            arguments = {"max_model_len": 128, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
            sizes = {"tensor_parallel_size": bench.tensor_parallel, "data_parallel_size": bench.data_parallel}
            return lora, arguments | sizes | {"dtype": "float32"}
        case "sglang":
            return lora | {"python": sglang_python(), "dtype": "float32"}, {"tp_size": bench.tensor_parallel}
        case _:
            return {}, {}


def sglang_python() -> str:
    """The interpreter that has SGLang: ``CHATLEARN_SGLANG_PYTHON``, or the one that ``make install-engines`` builds."""
    built = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
    return os.environ.get("CHATLEARN_SGLANG_PYTHON", str(built))


def _demonstrations(seed: int) -> TrainBatch:
    """Six random sequences: what is learned does not matter, as long as it changes the weights."""
    draw = np.random.default_rng(seed)
    samples = []
    for index in range(6):
        ids = draw.integers(3, 300, size=int(draw.integers(8, 20)))
        prompt = Prompt(f"{seed}-{index}", ids[:3], text="")
        mask = np.arange(len(ids)) >= 3
        samples.append(Sample(f"{seed}-{index}#0", f"{seed}-{index}", prompt, ids, mask))
    return pack_samples(samples)


def _request(name: str, prompt: tuple[int, ...], temperature: float) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, ignore_eos=True, seed=1)
    return GenerateRequest(name, np.array(prompt, dtype=np.int64), sampling)


def decided_prompts(plain: PlainModel) -> dict[tuple[int, ...], list[int]]:
    """Prompts whose greedy continuation no rounding can change, each with this continuation."""
    draw = np.random.default_rng(0)
    chosen: dict[tuple[int, ...], list[int]] = {}
    for _ in range(20 * NUM_PROMPTS):
        prompt = tuple(int(token) for token in draw.integers(3, 300, size=int(draw.integers(4, 12))))
        tokens = decided_greedy(plain, prompt)
        if tokens is not None:
            chosen[prompt] = tokens
        if len(chosen) == NUM_PROMPTS:
            return chosen
    raise AssertionError(f"only {len(chosen)} of {20 * NUM_PROMPTS} prompts have a decided continuation")


@torch.no_grad()
def decided_greedy(plain: PlainModel, prompt: tuple[int, ...]) -> list[int] | None:
    """The likeliest continuation, one forward a token; None as soon as two tokens are about equally likely."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        best = plain(torch.tensor(tokens))[-1].topk(2)
        if best.values[0] - best.values[1] <= GREEDY_MARGIN:
            return None
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


@torch.no_grad()
def sequence_logprobs(plain: PlainModel, prompt: tuple[int, ...], completion: Completion) -> np.ndarray[Any, Any]:
    """[C] of the raw distribution, which at temperature 1 is also the one that was sampled."""
    tokens = torch.tensor([*prompt, *completion.token_ids.tolist()])
    logs = torch.log_softmax(plain(tokens).float(), -1)[len(prompt) - 1 : -1]
    return logs.gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()
