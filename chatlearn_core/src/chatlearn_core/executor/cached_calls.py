"""Calls on frozen models whose results are kept on disk (``cache=True``): made once, before the roles of a run start.

A role that is called in no other way is then not part of the run: it is built only while something is missing from the
cache, and closed before any other role is. Its calls become reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import BackendError, ConfigError, FlowError
from chatlearn_core.executor.flow_calls import output_request
from chatlearn_core.executor.output_cache import OutputCache, entry_key, model_identity
from chatlearn_core.executor.scheduler import FlowCall
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.flow import Graph, Node
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.protocols import Runtime
from chatlearn_core.runtime.outputs import check_outputs
from chatlearn_core.runtime.plan import RolePlan, RunPlan, origin_of
from chatlearn_core.types import OutputRequest, Sample, SamplingParams, pack_samples, per_sequence

CHUNK_TOKENS = 1 << 16
"""Tokens that are computed between two writes to the disk: what a kill costs."""


def cached_nodes(graph: Graph, roles: Collection[str] | None = None) -> tuple[Node, ...]:
    """The calls whose results a flow wants to be kept; ``roles``: only those on them."""
    return tuple(n for n in graph.nodes if n.arguments.get("cache") and (roles is None or n.role in roles))


def check_cached(config: RunConfig, graph: Graph, changing: Collection[str]) -> None:
    """Check that cached results are the same in every step. Raises: FlowError or ConfigError: one is not."""
    for node in cached_nodes(graph):
        if node.inputs or node.samples_of:
            raise FlowError(
                f"{node.source}: {node.name}(cache=true) is given samples that other calls made or change; results are "
                "kept of the flow's own input alone, where the data bring their completions. Leave cache out"
            )
        if node.arguments.get("data_sources"):
            raise FlowError(f"{node.source}: {node.name} has cache=true and data_sources; leave one of the two out")
        if node.role in changing:
            raise ConfigError(
                f"{node.source}: {node.name}(cache=true), but the weights of role {node.role!r} change in this run (it "
                f"learns, or follows another role by roles.{node.role}.refresh). Set "
                "algorithm.options.cache_reference to false, or remove refresh"
            )


def kept_roles(plan: RunPlan, *graphs: Graph | None, snapshots: Mapping[str, str | None]) -> dict[str, RolePlan]:
    """The roles whose calls are all kept, so that the run does without them. A role that is called in another way too,
    or whose model's files are not on this machine, stays and is called every time.

    Args:
        snapshots: directory of each role's hub id (``ModelFacts.snapshot``). A kept role loads it in place of the hub
            id, which may name another commit later. One whose engine arguments set a revision stays.
    """
    calls = [node for graph in graphs if graph is not None for node in graph.nodes]
    others = {node.role for node in calls if not node.arguments.get("cache")}
    names = {node.role for node in calls} - others
    kept: dict[str, RolePlan] = {}
    for name, role in plan.roles.items():
        if name in names and role.model is not None:
            path = snapshots.get(name) if "revision" not in role.engine else None
            if Path(role.model.path).is_dir():
                kept[name] = role
            elif path is not None:
                kept[name] = replace(role, model=replace(role.model, path=path))
    return kept


def reading_graph(graph: Graph, kept: Collection[str]) -> Graph:
    """The graph with reads from the cache in place of the calls that are kept.

    Args:
        kept: roles of such calls.
    """
    nodes = tuple(
        replace(node, method=replace(node.method, name=f"cache.read_{node.method.method}", action=_reading(node)))
        if node.arguments.get("cache") and node.role in kept
        else node
        for node in graph.nodes
    )
    roles = {node.role: node.kind for node in nodes if node.function is None and node.kind != "cache"}
    return replace(graph, nodes=nodes, roles=roles)


def _reading(node: Node) -> str:
    """The action that reads what the call would compute: of other samples, the call's own action knows how."""
    return node.method.action if node.method.other_samples else f"{__name__}:read"


def asked_about(node: Node, samples: Sequence[Sample], max_length: int) -> Sequence[Sample]:
    """The samples whose outputs a call on ``samples`` requests."""
    present = [sample for sample in samples if sample.loss_mask.any()]
    function = node.method.other_samples
    if function is None or not present:
        return present
    others: Sequence[Sample] = resolve_import_string(function)(present, max_length)
    return others


@dataclass(slots=True)
class CachedCalls:
    """The kept calls of a run, and the roles that make them.

    Args:
        roles: of the calls, as planned.
    """

    cache: OutputCache
    roles: Mapping[str, RolePlan]
    _identities: dict[str, bytes] = field(default_factory=dict)

    def identity(self, role: str) -> bytes:
        """See ``model_identity``."""
        if role not in self._identities:
            self._identities[role] = model_identity(self.cache, self.roles[role])
        return self._identities[role]

    def key(self, role: str, asked: OutputRequest, sample: Sample) -> bytes:
        """Of a sample's entry."""
        return entry_key(self.identity(role), asked, sample)

    def arrays(self, call: FlowCall, sample: Sample) -> Mapping[str, npt.NDArray[Any]]:
        """Output -> what the role computed of a sample.

        Raises:
            BackendError: it was not computed.
        """
        arrays = self.cache.read(self.key(call.node.role, output_request(call.node, call.sampling), sample))
        if arrays is None:
            raise BackendError(
                f"{self.cache.path} has no {', '.join(call.node.fields)} of sample {sample.id!r}, which the sampler "
                "was not expected to draw: it depends on what earlier steps measured. Set "
                "algorithm.options.cache_reference to false"
            )
        return arrays

    def missing(self, wanted: Iterable[tuple[Node, SamplingParams, Sequence[Sample]]]) -> list[Missing]:
        """Return what calls on these samples must compute, each content once."""
        found: dict[tuple[str, frozenset[str], float, str], Missing] = {}
        for node, sampling, samples in wanted:
            asked = output_request(node, sampling)
            by_key = {self.key(node.role, asked, sample): sample for sample in samples if sample.loss_mask.any()}
            absent = self.cache.missing(by_key)
            if absent:
                place = (node.role, asked.names, asked.temperature, repr(sorted(asked.arguments.items())))
                missing = found.setdefault(place, Missing(node, asked))
                missing.samples |= {key: sample for key, sample in by_key.items() if key in absent}
        return list(found.values())

    async def fill(self, runtime: Runtime, missing: Sequence[Missing]) -> None:
        """Compute what is missing, with roles that are up, and write it chunk by chunk.

        Raises:
            BackendError, ContractError: a role failed.
        """
        for one in missing:
            for chunk in one.chunks():
                batch = pack_samples(list(chunk.values()))
                outputs = await runtime.trainer(one.node.role).compute(batch, one.asked)
                origin = origin_of(self.roles, one.node.role, "trainer")
                check_outputs(outputs, batch, one.asked, origin, {spec.name: spec for spec in one.node.outputs})
                numbers: dict[str, list[float]] = {}
                for spec in one.node.outputs:
                    values = outputs[spec.name]
                    if spec.per == "sequence":
                        numbers[spec.name] = values.tolist()
                        continue
                    rows = per_sequence(values, batch.lengths, batch.sample_ids, spec.name)
                    for sample, row in zip(chunk.values(), rows, strict=True):
                        sample.token_data[spec.name] = row
                fields = one.asked.names - numbers.keys()
                fetched = await runtime.data.aget(list(chunk.values()), fields)
                entries: dict[bytes, dict[str, npt.NDArray[Any]]] = {}
                for place, (key, sample) in enumerate(zip(chunk, fetched, strict=True)):
                    entries[key] = {name: np.asarray(sample.token_data[name]) for name in fields}
                    entries[key] |= {name: np.asarray(of_each[place]) for name, of_each in numbers.items()}
                self.cache.write(entries)


@dataclass(slots=True)
class Missing:
    """Samples of one call that have no entry yet."""

    node: Node
    asked: OutputRequest
    samples: dict[bytes, Sample] = field(default_factory=dict)
    """By key."""

    def chunks(self) -> Iterable[dict[bytes, Sample]]:
        """The samples, about ``CHUNK_TOKENS`` tokens at a time, long ones first, so that the first chunk needs the most
        memory.
        """
        chunk: dict[bytes, Sample] = {}
        tokens = 0
        for key, sample in sorted(self.samples.items(), key=lambda item: -len(item[1].token_ids)):
            if chunk and tokens + len(sample.token_ids) > CHUNK_TOKENS:
                yield chunk
                chunk, tokens = {}, 0
            # Of a sample nothing but its tokens is needed, and data that only some have would not pack.
            chunk[key] = replace(sample, token_data={}, sequence_data={})
            tokens += len(sample.token_ids)
        if chunk:
            yield chunk


async def read(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """Give each sample the role's outputs. Raises: BackendError: they were not computed."""
    calls, node = call.cached, call.node
    assert calls is not None, "a graph that reads the cache runs with one"
    for sample in (sample for request in requests for sample in request.samples):
        if not sample.loss_mask.any():
            continue
        arrays = calls.arrays(call, sample)
        for spec in node.outputs:
            name = node.output_fields[spec.name]
            if spec.per == "sequence":
                sample.sequence_data[name] = float(arrays[spec.name])
            else:
                sample.token_data[name] = arrays[spec.name]
