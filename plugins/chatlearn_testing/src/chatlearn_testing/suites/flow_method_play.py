"""Plays a flow that makes one call under test, with the kit's roles, up to the call and then the call itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.flow import Graph, Node, trace
from chatlearn_core.flow.vocabulary import FlowVocabulary
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import EnvironmentSpec, FlowMethodSpec, PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource, RolloutOrder
from chatlearn_core.protocols.prompt_renderer import RenderedPrompt
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan
from chatlearn_core.types import (
    Completion,
    ExampleDraw,
    GenerateRequest,
    OutputRequest,
    Outputs,
    Prompt,
    RewardResult,
    Rollout,
    Sample,
    SamplingParams,
    TrainBatch,
    sample_from_completion,
)
from chatlearn_testing.fakes import records
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.fakes.family import FIRST_LETTER, BigramFamily, LetterRenderer, LetterTokenizer
from chatlearn_testing.fakes.options import FakeOptions
from chatlearn_testing.suites.algorithm_roles import VOCAB, AlgorithmRoles, TableTrainer

OWN, OTHER = "own", "other"
"""Roles of the kind under test; all other roles of the flow are ``generator``, ``trainer`` and ``reward``."""
GROUP_SIZE = 2
NUM_PROMPTS = 3
FAILS = "p1@0#1"
"""The sample whose generation fails, where one is to fail."""
Change = Callable[[Any], Any]
"""Replaces what a role under test returns."""
FlowPart = Callable[[Any, Any], Any]
"""``(samples, m)`` -> samples: calls of a flow."""


@dataclass(slots=True, frozen=True)
class AnyTextTokenizer(LetterTokenizer):
    """Takes every character: those that are no letter have the token of one."""

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Encode text."""
        return [(ord(letter) - ord(FIRST_LETTER)) % self.vocab_size for letter in text]


@dataclass(slots=True, frozen=True)
class AnyTextRenderer(LetterRenderer):
    """Renders text unchanged, and messages as their contents."""

    def prompt(self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> RenderedPrompt:
        """See ``PromptRenderer``."""
        text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        return RenderedPrompt(text, np.array(self.tokenizer.encode(text), np.int64), ())


class AnyTextFamily(BigramFamily):
    """The family of the kit's roles, for calls that render prompts and decode completions anew."""

    def load_tokenizer(self, source: ModelSource) -> LetterTokenizer:
        """See ``ModelFamily``."""
        return AnyTextTokenizer(self.facts(source).vocab_size)

    def renderer(self, tokenizer: LetterTokenizer, **settings: Any) -> LetterRenderer:
        """See ``ModelFamily``."""
        return AnyTextRenderer(tokenizer)


@dataclass(slots=True, frozen=True)
class SampleFacts:
    """All that a flow's calls may read of a sample, as values of their own."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    num_prompt_tokens: int
    num_turns: int
    reward: RewardResult | None
    unit_id: str
    exclusion: str | None
    token_data: Mapping[str, Any]
    sequence_data: Mapping[str, float]

    @classmethod
    def of(cls, sample: Sample) -> SampleFacts:
        """The facts of a sample at this moment."""
        return cls(
            tuple(map(int, sample.token_ids)),
            tuple(map(bool, sample.loss_mask)),
            sample.num_prompt_tokens,
            len(sample.turns),
            sample.reward,
            sample.unit_id,
            sample.exclusion,
            {name: np.array(rows) for name, rows in sample.token_data.items()},
            dict(sample.sequence_data),
        )

    def value(self, name: str) -> Any:
        """The data of that name; None if there is none. ``reward`` is the value of the reward."""
        if name in self.token_data:
            return self.token_data[name]
        if name == "reward":
            return None if self.reward is None else self.reward.value
        return self.sequence_data.get(name)

    @property
    def names(self) -> frozenset[str]:
        """Names of all data."""
        return frozenset(self.token_data) | frozenset(self.sequence_data)


@dataclass(slots=True)
class Played:
    """A flow that was played."""

    graph: Graph
    calls: tuple[Node, ...]
    """The calls under test."""
    requests: list[RolloutRequest]
    roles: FlowRoles
    before: dict[str, SampleFacts]
    """Sample id -> its facts before the calls under test; empty if these make the samples."""

    @property
    def samples(self) -> list[Sample]:
        """All samples, in order."""
        return [sample for request in self.requests if request.sample is not None for sample in request.samples]

    @property
    def after(self) -> dict[str, SampleFacts]:
        """Sample id -> its facts now."""
        return {sample.id: SampleFacts.of(sample) for sample in self.samples}


@dataclass(slots=True)
class FlowRoles(AlgorithmRoles):
    """The kit's roles; the one under test may fail or return something else."""

    error: Exception | None = None
    change: Change | None = None
    seen: list[tuple[TrainBatch, OutputRequest]] = field(default_factory=list)
    """What the trainer role under test was asked to compute."""

    def trainer(self, role: str) -> Any:
        """The trainer role."""
        return _RoleOf(self, role)

    generator = reward = environment = trainer


@dataclass(slots=True, frozen=True)
class _RoleOf:
    """One role, of any kind."""

    roles: FlowRoles
    role: str

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        if self.role == OWN:
            self.roles.seen.append((batch, request))
        made: Outputs = self._answer(await self.roles.trainers[self.role].compute(batch, request))
        return made

    async def generate(self, request: GenerateRequest) -> Completion:
        made: Completion = self._answer(await self.roles.generate(request))
        return made

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        made: list[RewardResult] = self._answer(await self.roles.score(samples))
        return made

    async def rollout(self, order: RolloutOrder, generate: Any) -> Rollout:
        """One turn."""
        prompt = order.example.prompt
        sampling = replace(order.sampling, seed=order.seed)
        found = await generate("policy", GenerateRequest(f"{order.id}/0", prompt.token_ids, sampling, order.group_id))
        sample = sample_from_completion(order.id, order.group_id, prompt, found)
        made: Rollout = self._answer(Rollout(order.id, order.group_id, order.example, [sample]))
        return made

    def _answer(self, value: Any) -> Any:
        if self.role != OWN:
            return value
        if self.roles.error is not None:
            raise self.roles.error
        return value if self.roles.change is None else self.roles.change(value)


@dataclass(slots=True)
class KitCompletions:
    """Answers calls on generators from the kit's roles; the first turn of one sample may fail."""

    roles: FlowRoles
    fails: str | None = None
    turns_together: bool = True

    def begin(self) -> None:
        """Nothing to prepare."""

    async def completion(self, role: str, request: RolloutRequest) -> Completion:
        """See ``CompletionSource``."""
        assert request.generate_request is not None, "a flow over prompts gives every rollout a generation request"
        if request.sample_id == self.fails:
            raise BackendError("the kit's generator lost this request on purpose")
        made: Completion = await self.roles.generator(role).generate(request.generate_request)
        return made


@dataclass(slots=True, frozen=True)
class FlowStage:
    """One call under test, in a flow of its own, and how to play it."""

    record: FlowMethodSpec
    registry: PluginRegistry
    """Has the record."""
    arguments: Mapping[str, Any]
    prepare: FlowPart | None
    function: str | None
    sampling: SamplingParams
    model: Path
    """A model directory of the kit, for roles whose tokenizer is read."""

    @property
    def kinds(self) -> dict[str, str]:
        """Role -> kind."""
        kind = self.record.role_kind
        named = {"generator": "generator", "trainer": "trainer", "reward": "reward"}
        return named if kind == "function" else {**named, OWN: kind, OTHER: kind}

    def graph(self, roles: Sequence[str] = (OWN,), **arguments: Any) -> Graph:
        """The traced flow, with the call on each of these roles.

        Args:
            roles: of the kind under test.
            arguments: in addition to those of the suite.
        """

        def call(m: Any, role: str, given: Any) -> Any:
            own = {**self.arguments, **arguments}
            if self.record.role_kind == "function":
                return m.apply(self.function, given, **own)
            return getattr(getattr(m, role), self.record.method)(given, **own)

        def flow(examples: Any, m: Any) -> Any:
            if self.record.takes == "examples":
                return call(m, roles[0], examples)
            samples = m.generator.generate(examples)
            if self.prepare is not None:
                samples = self.prepare(samples, m)
            made = [call(m, role, samples) for role in roles]
            return made[0] if self.record.changes else m.join(samples, *made)

        uses = {role: ["generator"] for role in roles} if self.record.role_kind == "environment" else None
        return trace(flow, self.kinds, vocabulary=FlowVocabulary.of(self.registry), uses=uses)

    def play(
        self,
        graph: Graph | None = None,
        *,
        seed: int = 0,
        error: Exception | None = None,
        change: Change | None = None,
        fails: str | None = None,
        unit: str = "batch",
        run_dir: Path = Path("run"),
    ) -> Played:
        """Play the flow.

        Args:
            graph: the flow; by default the one call.
            seed: other seeds give other samples.
            error: raised by the role under test.
            change: replaces what the role under test returns.
            fails: the sample whose generation fails.
            unit: what the calls under test get at a time: ``sample``, ``group`` or ``batch``.
        """
        graph = graph or self.graph()
        roles = self.roles(error, change)
        calls = tuple(node for node in graph.nodes if node.method.name == self.record.name and self._tests(node))
        first = tuple(node for node in graph.nodes if node not in calls)
        makers = [node for node in graph.nodes if node.method.takes == "examples"]
        draws = [ExampleDraw(prompt, 0, f"{prompt.id}@0 {seed}") for prompt in prompts()]
        requests = make_requests(draws, GROUP_SIZE, self.sampling, seed, makers)
        played = Played(graph, calls, requests, roles, {})

        async def run() -> None:
            if first:
                await self._scheduler(played, first, run_dir, fails).run(requests, Timers())
                played.before = played.after
            scheduler = self._scheduler(played, calls, run_dir, fails)
            try:
                for together in _units(requests, unit):
                    await scheduler.run(together, Timers())
            finally:
                scheduler.close()

        asyncio.run(run())
        return played

    def roles(self, error: Exception | None = None, change: Change | None = None) -> FlowRoles:
        """The roles of the flow."""
        outputs = self.registry.outputs
        trainers = {name: TableTrainer(name, outputs) for name, kind in self.kinds.items() if kind == "trainer"}
        return FlowRoles(trainers, trainers["trainer"], error=error, change=change)

    def _tests(self, node: Node) -> bool:
        return node.role in (OWN, OTHER) or self.record.role_kind == "function"

    def _scheduler(self, played: Played, stage: Sequence[Node], run_dir: Path, fails: str | None) -> FlowScheduler:
        runtime: Any = played.roles
        return FlowScheduler(
            played.graph,
            runtime,
            KitCompletions(played.roles, fails),
            stage=stage,
            sampling=self.sampling,
            plan=RunPlan(self.registry, {name: self._role(name) for name in self.kinds}, (), run_dir, 0),
            max_length=64,
        )

    def _role(self, name: str) -> RolePlan:
        kind = self.kinds[name]
        record = _ENVIRONMENT if kind == "environment" else _RECORDS.get(kind, records.FAKE_TRAINER)
        uses = {"policy": "generator"} if kind == "environment" else {}
        backend = BackendPlan(f"roles.{name}", record, FakeOptions(), uses=uses)
        source = ModelSource(str(self.model), str(self.model))
        return RolePlan(name, kind, (backend,), source, "lm", "cpu", 1, 1, False, {}, 60.0)


def with_record(registry: PluginRegistry, record: PluginRecord) -> PluginRegistry:
    """The installed plugins and this record, in place of one of its name; model directories are the kit's."""
    kept = [
        entry
        for entry in registry.entries
        if entry.kind != "model_family" and (entry.kind, entry.name) != (record.kind, record.name)
    ]
    family = replace(records.BIGRAM_FAMILY, model_types=frozenset(), factory=f"{__name__}:AnyTextFamily")
    made = [
        PluginEntry(name=one.name, kind=one.kind, distribution="conformance", version="0", status="ok", record=one)
        for one in (record, family)
    ]
    return replace(registry, entries=(*kept, *made))


def prompts() -> list[Prompt]:
    """Prompts of several lengths, whose text the kit's tokenizer reads as their tokens."""
    tokenizer, drawn = LetterTokenizer(VOCAB), np.random.default_rng(5)
    made = []
    for number in range(NUM_PROMPTS):
        ids = drawn.integers(1, VOCAB, 2 + number)
        made.append(Prompt(f"p{number}", ids, tokenizer.decode(ids.tolist()), data_source="conformance"))
    return made


def build_model(directory: Path) -> Path:
    """The model directory of the kit's roles."""
    directory.mkdir(parents=True)
    return build_bigram_model(directory, vocab_size=VOCAB)


def shortest(samples: Sequence[Sample], keep: int = 1) -> list[Sample]:
    """The ``keep`` shortest samples, for a flow that applies a function; of equals the first."""
    return sorted(samples, key=lambda sample: len(sample.token_ids))[:keep]


_ENVIRONMENT = EnvironmentSpec(name="kit", factory="kit:none", options="kit:none")
_RECORDS: Mapping[str, Any] = {"generator": records.FAKE_GENERATOR, "reward": records.FAKE_REWARD}


def _units(requests: Sequence[RolloutRequest], unit: str) -> list[list[RolloutRequest]]:
    if unit == "batch":
        return [list(requests)]
    if unit == "sample":
        return [[request] for request in requests]
    groups: dict[str, list[RolloutRequest]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    return list(groups.values())
