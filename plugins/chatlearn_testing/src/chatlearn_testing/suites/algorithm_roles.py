"""Roles that an algorithm's flow calls in its suite: tables that give real distributions, values and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import OutputSpec
from chatlearn_core.protocols import Device, Loss, PlainData
from chatlearn_core.protocols.algorithm import Split
from chatlearn_core.runtime.outputs import row_shape
from chatlearn_core.types import (
    KEPT_IDS,
    Completion,
    Derived,
    GenerateRequest,
    Metric,
    Metrics,
    OutputRequest,
    Outputs,
    RewardResult,
    Sample,
    TrainBatch,
    VersionSpan,
    merge_metrics,
)
from chatlearn_core.types.keyed_seed import keyed_seed

VOCAB = 80
"""Number of token ids; above the 64 most likely ones that a full KL asks for by default."""
LEARNING_RATE = 0.05


def keyed_generator(*key: str | int) -> torch.Generator:
    """Random numbers that depend on the key alone, not on how many were drawn before."""
    return torch.Generator().manual_seed(keyed_seed(0, *key))


@dataclass(slots=True)
class TableTrainer:
    """A trainer role whose outputs depend on the token and the one before it; float64, with exact gradients.

    ``update`` splits each mini-batch into ``num_parts`` micro-batches of whole units, and an empty one.
    """

    role: str
    specs: Mapping[str, OutputSpec]
    num_parts: int = 1
    tables: dict[str, Tensor] = field(default_factory=dict)
    """Output or ``logits`` -> its parameters."""
    nudge: float = 0.0
    updates: int = 0

    def table(self, name: str, *shape: int) -> Tensor:
        """The parameters of an output, drawn when they are first asked for."""
        if name not in self.tables:
            drawn = torch.randn(*shape, generator=keyed_generator(self.role, name), dtype=torch.float64)
            if self.nudge:
                step = torch.randn(*shape, generator=keyed_generator("nudge", self.role, name), dtype=torch.float64)
                drawn += self.nudge * step
            self.tables[name] = drawn.requires_grad_()
        return self.tables[name]

    def nudged(self, amount: float) -> TableTrainer:
        """A trainer whose parameters differ by normal numbers times ``amount``, as after some updates."""
        return replace(self, tables={}, nudge=amount)

    def outputs(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Every requested output, with its graph; 0 where ``loss_mask`` is False, as ``OutputSpec.masked`` says."""
        return {name: self._output(name, batch, request) for name in sorted(request.names)}

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """See ``TrainerGroup``: float32, without a graph."""
        with torch.no_grad():
            found = self.outputs(batch, request)
        return {name: values.float() if values.is_floating_point() else values for name, values in found.items()}

    async def derive(self, batch: TrainBatch, function: Callable[[TrainBatch], Derived], split: Split) -> Derived:
        """See ``TrainerGroup``: one rank."""
        return function(batch)

    async def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """See ``TrainerGroup``: one step of plain gradient descent."""
        units = sorted(set(batch.unit_index.tolist()))
        of_unit = [[i for i, unit in enumerate(batch.unit_index.tolist()) if unit == wanted] for wanted in units]
        parts = [[i for members in of_unit[part :: self.num_parts] for i in members] for part in range(self.num_parts)]
        metrics: list[Metrics] = []
        total = 0.0
        for indices in (*parts, []):
            part = batch.select(indices)
            made = loss(self.outputs(part, loss.needs), part)
            if made.total.requires_grad:
                made.total.backward()  # type: ignore[no-untyped-call]  # torch does not type it
            total += float(made.total.detach())
            metrics.append(made.metrics)
        norm = 0.0
        with torch.no_grad():
            for values in self.tables.values():
                if values.grad is not None:
                    norm += float(values.grad.square().sum())
                    values -= LEARNING_RATE * values.grad
                    values.grad = None
        self.updates += 1
        return merge_metrics(*metrics) | {"loss": Metric(total, reducer="sum"), "grad_norm": Metric(norm**0.5)}

    def _output(self, name: str, batch: TrainBatch, request: OutputRequest) -> Tensor:
        if name not in self.specs:
            raise PluginError(f"the output {name!r} is asked of {self.role!r}, and no installed plugin describes it")
        spec = self.specs[name]
        before = batch.token_ids.roll(1)
        starts = batch.cu_seqlens[:-1].long()
        before[starts] = batch.token_ids[starts]
        logits = self.table("logits", VOCAB, VOCAB)[before] / request.temperature
        arguments = {key: batch.token_data.get(str(value)) for key, value in request.arguments.items()}
        if name in ("logprobs", "entropy", "topk_ids", "topk_logprobs", "logprobs_at"):
            values = _of_distribution(name, logits.log_softmax(-1), batch, request, arguments.get("ids"))
        elif name == "truncated_logprobs":
            kept = arguments["kept"]
            assert kept is not None, "the core's checks of the flow refuse a request without kept ids"
            there = logits.gather(-1, kept.clamp(min=0).long()).masked_fill(kept < 0, -torch.inf)
            own = logits.gather(-1, batch.token_ids[:, None])[:, 0]
            empty = ~(kept >= 0).any(-1)  # prompts; they are masked
            values = own - there.masked_fill(empty[:, None], 0.0).logsumexp(-1)
        else:
            values = self._other(spec, batch, request, before)
        if spec.per == "token" and spec.masked:
            outside = ~batch.loss_mask if values.ndim == 1 else ~batch.loss_mask[:, None]
            values = values.masked_fill(outside, 0)
        return values

    def _other(self, spec: OutputSpec, batch: TrainBatch, request: OutputRequest, before: Tensor) -> Tensor:
        """Outputs that are no distribution: rows of a table, within the bounds of the record."""
        if spec.dtype != "float":
            raise PluginError(f"the kit's trainers cannot compute {spec.name!r}, whole numbers that no plugin explains")
        row = [size or 4 for size in row_shape(spec, batch, request)]
        values = self.table(spec.name, VOCAB, VOCAB, *row)[before, batch.token_ids]
        if spec.per == "sequence":
            made = values.new_zeros((batch.num_sequences, *row)).index_add(0, batch.sequence_index, values)
            counts = batch.cu_seqlens.diff().clamp(min=1)
            values = made / counts.view(-1, *[1] * len(row))
        if spec.at_least is not None and spec.at_most is not None:
            return spec.at_least + (spec.at_most - spec.at_least) * values.sigmoid()
        if spec.at_least is not None:
            return spec.at_least + functional.softplus(values)
        return values if spec.at_most is None else spec.at_most - functional.softplus(values)


def _of_distribution(
    name: str, logprobs: Tensor, batch: TrainBatch, request: OutputRequest, ids: Tensor | None
) -> Tensor:
    if name == "logprobs":
        return logprobs.gather(-1, batch.token_ids[:, None])[:, 0]
    if name == "entropy":
        return -(logprobs.exp() * logprobs).sum(-1)
    if name == "logprobs_at":
        assert ids is not None, "the core's checks of the flow refuse a request without ids"
        return logprobs.gather(-1, ids.long())
    values, found = logprobs.topk(int(request.arguments["k"]), -1)
    return found if name == "topk_ids" else values


@dataclass(slots=True)
class AlgorithmRoles:
    """The part of a runtime that flows and updates use: every role of the algorithm, answering at once.

    Completions are of the policy at the request's temperature and top-k, some tokens long, the same for the same
    request. Rewards are between 0 and 1, the same for the same sample, and differ between samples: an algorithm may
    break ties as it likes.
    """

    trainers: Mapping[str, TableTrainer]
    policy: TableTrainer
    components: Sequence[str] = ()
    """Components that every reward has."""
    steps: bool = False
    """Whether rewards have rewards of steps."""
    data: PlainData = field(default_factory=PlainData)

    def devices(self) -> Mapping[str, Sequence[Device]]:
        """No role shares a device."""
        return {}

    def trainer(self, role: str) -> TableTrainer:
        """The trainer role."""
        return self.trainers[role]

    def generator(self, role: str) -> AlgorithmRoles:
        """The generator role; all answer alike."""
        return self

    def reward(self, role: str) -> AlgorithmRoles:
        """The reward role; all answer alike."""
        return self

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample a completion, or score the forced ids."""
        drawn, sampling = keyed_generator("completion", request.id), request.sampling
        length = 1 + int(torch.randint(sampling.max_tokens, (1,), generator=drawn))
        length = length if request.forced_ids is None else len(request.forced_ids)
        token = int(request.prompt_ids[-1])
        tokens, logprobs, kept = list[int](), list[float](), list[list[int]]()
        table = self.policy.table("logits", VOCAB, VOCAB).detach()
        for place in range(length):
            logits = table[token] / (sampling.temperature or 1.0)
            ids = logits.topk(sampling.top_k or VOCAB).indices
            distribution = logits[ids].log_softmax(-1)
            chosen = int(torch.multinomial(distribution.exp(), 1, generator=drawn))
            token = int(ids[chosen])
            if request.forced_ids is not None:
                token = int(request.forced_ids[place])
                chosen = int((ids == token).nonzero()[0])
            tokens.append(token)
            logprobs.append(float(distribution[chosen]))
            kept.append(ids.tolist()[: sampling.max_kept_ids])
        return Completion(
            request_id=request.id,
            token_ids=np.array(tokens, np.int64),
            logprobs=np.array(logprobs, np.float32),
            basis=sampling.basis,
            finish_reason="stop",
            sampling=sampling,
            version_spans=(VersionSpan(0, length, 0),),
            text=" ".join(map(str, tokens)),
            token_data={KEPT_IDS: np.array(kept, np.int32)} if sampling.max_kept_ids else {},
        )

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Judge each sample by itself."""
        return [self._verdict(sample) for sample in samples]

    def _verdict(self, sample: Sample) -> RewardResult:
        drawn = keyed_generator("reward", sample.id)
        value = float(torch.rand(1, generator=drawn, dtype=torch.float64))
        components = {name: float(torch.rand(1, generator=drawn)) for name in self.components}
        if not self.steps:
            return RewardResult(value, components)
        count = sample.num_completion_tokens
        ends = np.unique([count // 2, count - 1])
        tokens = np.zeros(count, np.float32)
        tokens[ends] = torch.rand(len(ends), generator=drawn).numpy()
        return RewardResult(value, components, tokens, step_ends=ends.astype(np.int64))


def sequence_rows(batch: TrainBatch, values: Tensor) -> dict[str, Tensor]:
    """Sample id -> its rows of per-token values."""
    bounds = pairwise(batch.cu_seqlens.tolist())
    return {name: values[start:stop] for name, (start, stop) in zip(batch.sample_ids, bounds, strict=True)}
