"""A step of an algorithm in its suite: the flow over the kit's roles, the advantages, and the batches of the losses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from chatlearn_core.data import Prompts
from chatlearn_core.executor.advantages import AdvantageComputer
from chatlearn_core.executor.aggregations import select_aggregation
from chatlearn_core.executor.policy_updater import PolicyUpdater, unit_index
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.step_samples import RolloutRequest, finished_groups, samples_of
from chatlearn_core.flow import Graph, trace
from chatlearn_core.flow.vocabulary import FlowVocabulary
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Algorithm, AlgorithmContext, Loss, LossOutput, RoleUpdate
from chatlearn_core.types import (
    Answer,
    Demonstration,
    Example,
    ExampleDraw,
    Metrics,
    Outputs,
    Preference,
    Prompt,
    Sample,
    SamplingParams,
    TrainBatch,
    pack_samples,
    scored_batch,
)
from chatlearn_testing.fakes.fleet_completions import FleetCompletions
from chatlearn_testing.suites.algorithm_roles import VOCAB, AlgorithmRoles, TableTrainer, keyed_generator

TEMPERATURE = 0.7
"""Of the samples; not 1, so that a loss that forgets it is noticed."""
MAX_TOKENS = 7
NUM_PROMPTS = 5


@dataclass(slots=True, frozen=True)
class AlgorithmSetup:
    """What a run gives an algorithm, of the kit's roles."""

    registry: PluginRegistry
    make: Callable[[AlgorithmContext], Algorithm]
    roles: Mapping[str, str]
    """Name -> kind."""
    sampling: SamplingParams
    examples: Sequence[Example] = ()
    """Empty: examples of the kit, of the algorithm's ``input``."""
    components: Sequence[str] = ()
    steps: bool = False

    @property
    def context(self) -> AlgorithmContext:
        """A context as the core makes it."""
        return AlgorithmContext(
            self.sampling.basis,
            self.sampling.max_tokens,
            self.roles,
            generator="the kit's generator",
            aggregation=partial(select_aggregation, self.registry),
            prompts_per_step=NUM_PROMPTS,
        )


@dataclass(slots=True)
class AlgorithmStep:
    """One algorithm, its traced flow, and the roles that answer it."""

    setup: AlgorithmSetup
    num_parts: int = 1
    """Micro-batches of each update."""
    algorithm: Algorithm = field(init=False)
    graph: Graph = field(init=False)
    roles: AlgorithmRoles = field(init=False)

    def __post_init__(self) -> None:
        setup = self.setup
        self.algorithm = setup.make(setup.context)
        kind = setup.registry.select("example_kind", self.algorithm.input, "input of the algorithm")
        self.graph = trace(
            self.algorithm.flow,
            setup.roles,
            given=self.algorithm.input if getattr(kind, "has_samples", False) else None,
            vocabulary=FlowVocabulary.of(setup.registry),
        )
        trainers = {
            name: TableTrainer(name, setup.registry.outputs, self.num_parts)
            for name, kind in setup.roles.items()
            if kind == "trainer"
        }
        policy = trainers.get(self.algorithm.policy or self.learners[-1], next(iter(trainers.values())))
        self.roles = AlgorithmRoles(trainers, policy, setup.components, setup.steps)

    @property
    def learners(self) -> list[str]:
        """The roles that the first steps update, in order."""
        return list(dict.fromkeys(update.role for step in range(1, 4) for update in self.updates(step)))

    def updates(self, step: int = 1) -> Sequence[RoleUpdate]:
        """The updates of a step."""
        return self.algorithm.updates(step)

    def requests(self) -> list[RolloutRequest]:
        """The requests of the step's examples."""
        kind: Any = Prompts()
        if self.algorithm.input != "prompts":
            record = self.setup.registry.select("example_kind", self.algorithm.input, "input of the algorithm")
            kind = self.setup.registry.load_factory(record)()
        examples = self.setup.examples or kit_examples(self.algorithm.input)
        draws = [ExampleDraw(example, 0, f"{example.id}@0") for example in examples]
        calls = [node for node in self.graph.nodes if node.method.takes == "examples"]
        return make_requests(draws, self.algorithm.group_size, self.setup.sampling, 0, calls, kind)

    def samples(self) -> list[Sample]:
        """The samples after all calls of the flow, some with a token inside that is not trained on."""

        async def played() -> list[Sample]:
            requests, learners = self.requests(), self.learners
            production, consumption = self.graph.stages(learners)
            if production:
                await self._scheduler(production).run(requests, Timers())
            for request in requests:
                for sample in request.samples:
                    with_hole(sample)
            if consumption:
                await self._scheduler(consumption).run(requests, Timers())
            return samples_of(finished_groups(requests))

        return asyncio.run(played())

    def derived(self, samples: Sequence[Sample]) -> Metrics:
        """Add the algorithm's advantages to the samples, as a run does; returns its metrics."""
        computer = AdvantageComputer(self.algorithm, lambda: self.roles.policy)  # type: ignore[arg-type,return-value]  # no memory, no checkpoints
        return asyncio.run(computer.add(samples, 1))

    def batches(self, samples: Sequence[Sample]) -> list[tuple[RoleUpdate, TrainBatch]]:
        """The first update of each role, with the step's batch before ``prepare``."""
        admitted = [sample for sample in samples if sample.exclusion is None]
        first: dict[str, RoleUpdate] = {}
        for step in range(1, 4):
            for update in self.updates(step):
                first.setdefault(update.role, update)
        return [(update, pack_samples(admitted, unit_index(admitted, update.loss))) for update in first.values()]

    def train(self, step: int = 1) -> Metrics:
        """Make a whole step, as a run does: flow, advantages and updates."""

        async def trained() -> Metrics:
            requests = self.requests()
            production, consumption = self.graph.stages(self.learners)
            if production:
                await self._scheduler(production).run(requests, Timers())
            for request in requests:
                for sample in request.samples:
                    with_hole(sample)
            runtime: Any = self.roles
            updater = PolicyUpdater(
                runtime,
                self.algorithm,
                consumption=self._scheduler(consumption),
                advantages=AdvantageComputer(self.algorithm, lambda: runtime.policy),
                num_mini_batches=2,
                epochs=2,
                seed=0,
                policy=self.algorithm.policy,
            )
            experience = await updater.prepare(step, finished_groups(requests), 0, Timers())
            return experience.metrics | await updater.train(experience, Timers())

        return asyncio.run(trained())

    def _scheduler(self, stage: Sequence[Any]) -> FlowScheduler:
        runtime: Any = self.roles
        return FlowScheduler(self.graph, runtime, FleetCompletions(runtime), stage=stage, sampling=self.setup.sampling)


def with_hole(sample: Sample) -> None:
    """Take the second of three or more tokens after the prompt out of the mask, as an environment's answer is."""
    place = sample.num_prompt_tokens + 1
    if sample.num_completion_tokens < 3 or not sample.loss_mask[place]:
        return
    sample.loss_mask = sample.loss_mask.copy()
    sample.loss_mask[place] = False
    for name, values in sample.token_data.items():
        copied = values.copy()
        copied[place] = -1 if name == "policy_version" else 0
        sample.token_data[name] = copied


def kit_examples(kind: str) -> list[Example]:
    """Examples of a kind: prompts, demonstrations, and completions with labels or ranks."""
    drawn = np.random.default_rng(5)
    made: list[Example] = []
    for number in range(NUM_PROMPTS):
        prompt = Prompt(f"p{number}", drawn.integers(0, VOCAB, 1 + number % 3), "?", data_source="conformance")
        completions = [drawn.integers(0, VOCAB, 1 + int(drawn.integers(MAX_TOKENS))) for _ in range(2 + number % 2)]
        if kind == "prompts":
            made.append(prompt)
        elif kind == "demonstrations":
            made.append(Demonstration(prompt, completions[0]))
        else:
            answers = tuple(map(Answer, completions))
            ranks = tuple(float(rank) for rank in drawn.permutation(len(answers)))
            labels = tuple(rank == max(ranks) for rank in ranks)
            labelled = "label" in kind
            made.append(Preference(prompt, answers, () if labelled else ranks, labels if labelled else ()))
    return made


def scored(samples: Sequence[Sample]) -> TrainBatch:
    """The samples as ``advantages`` gets them."""
    return scored_batch(samples)


def leaves(outputs: Outputs) -> Outputs:
    """The outputs as tensors of their own, floating-point ones with gradients."""
    return {
        name: values.detach().clone().requires_grad_(values.is_floating_point()) for name, values in outputs.items()
    }


def gradients(made: LossOutput, outputs: Outputs) -> Outputs:
    """The gradient of a loss for each floating-point output; 0 where the loss does not depend on it."""
    wanted = {name: values for name, values in outputs.items() if values.is_floating_point()}
    if not made.total.requires_grad:
        return {name: torch.zeros_like(values) for name, values in wanted.items()}
    found = torch.autograd.grad(made.total, list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(values) if gradient is None else gradient
        for (name, values), gradient in zip(wanted.items(), found, strict=True)
    }


def selected(outputs: Outputs, batch: TrainBatch, indices: Sequence[int], per_sequence: Collection[str]) -> Outputs:
    """The rows of the outputs that belong to the sequences ``indices``, with their graph."""
    bounds = batch.cu_seqlens.tolist()
    rows = [row for i in indices for row in range(bounds[i], bounds[i + 1])]
    return {name: values[list(indices) if name in per_sequence else rows] for name, values in outputs.items()}


class FrozenDetach(TorchFunctionMode):
    """Gives every ``detach`` the value that it had in the first evaluation, so that finite differences see constants
    where a gradient does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []
        self.place: int | None = None
        """The next value to give; None while they are recorded."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLW3201, RUF100  # torch's name
        made = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") not in ("detach", "detach_"):
            return made
        if self.place is None:
            self.values.append(made.clone())
            return made
        self.place += 1
        return self.values[self.place - 1]


def slopes(
    loss: Loss, outputs: Outputs, batch: TrainBatch, *, frozen: bool, count: int = 6
) -> list[tuple[str, float, float]]:
    """(output, slope by the gradient, slope by central differences) in ``count`` random directions of each output.

    Args:
        loss: the prepared loss.
        outputs: float64.
        batch: after ``prepare``.
        frozen: whether detached values stay as they are.
    """
    mode = FrozenDetach()
    ready = leaves(outputs)
    if frozen:
        with mode:
            made = loss(ready, batch)
    else:
        made = loss(ready, batch)
    found = gradients(made, ready)
    width, rows = 1e-6, list[tuple[str, float, float]]()

    def total(name: str, moved: Tensor) -> float:
        given = {**outputs, name: moved}
        with torch.no_grad():
            if not frozen:
                return float(loss(given, batch).total)
            mode.place = 0
            with mode:
                return float(loss(given, batch).total)

    for name, gradient in found.items():
        for number in range(count):
            direction = torch.randn(gradient.shape, generator=keyed_generator(name, number), dtype=torch.float64)
            if gradient.shape[:1] == batch.loss_mask.shape:
                outside = ~batch.loss_mask.view(-1, *[1] * (gradient.ndim - 1))
                direction = direction.masked_fill(outside, 0.0)
            values = outputs[name].detach()
            up, down = total(name, values + width * direction), total(name, values - width * direction)
            rows.append((name, float((gradient * direction).sum()), (up - down) / (2 * width)))
    return rows


def reordered(batch: TrainBatch, order: Sequence[int]) -> TrainBatch:
    """The sequences in another order; units and groups are numbered as they come."""
    made = batch.select(order)
    return replace(made, unit_index=_renumbered(made.unit_index), group_index=_renumbered(made.group_index))


def _renumbered(index: Tensor) -> Tensor:
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(int(one), len(numbers)) for one in index.tolist()], dtype=torch.int64)
