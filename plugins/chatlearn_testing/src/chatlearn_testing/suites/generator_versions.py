"""The contract of a generator over several policy versions: what a sync changes, and what it must leave alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import BackendError, WeightSyncError
from chatlearn_core.plugins.compatibility import kv_after_sync_of
from chatlearn_core.types import Completion, VersionSpan
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.model_directory import manifest_of, read_checkpoint
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    LONG,
    NUM_TOKENS,
    PROMPTS,
    GeneratorFixtures,
    HalfWay,
    Replica,
    ask,
    assert_completion,
    assert_logprobs,
    idle,
    plain_greedy,
    plain_logprobs,
)
from chatlearn_testing.suites.generator_resumption import assert_keeps

ATTEMPTS = 10
"""Attempts to sync while a request is half way; the first is enough for a generator that streams."""
NUM_OLD = 5
"""Tokens sampled before a sync."""


class VersionsContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about policy versions."""

    def test_a_resumed_completion_keeps_its_versions(
        self,
        synced: Replica,
        new_reference: torch.nn.Module,
        new_model: Path,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """A completion resumed after a sync keeps tokens, logprobs and versions of its first part; the new weights
        sample the rest, with the new version.

        Old tokens with the new version, or with logprobs of the new weights: the importance ratio of these tokens would
        be computed against a policy that did not sample them.
        """
        self._require_tensors()
        if not self.record().resumable:
            not_applicable("the record does not declare 'resumable'")
        version = synced.generator.policy_version + 1
        synced.sync(tensors, version)
        [part] = synced.ask(ask("first", max_tokens=NUM_OLD))
        prior = replace(part, finish_reason="abort", sampling=ask("whole").sampling)
        synced.sync(read_checkpoint(new_model), version + 1)
        [resumed] = synced.ask(ask("whole", resume_from=prior))
        assert_keeps(prior, resumed)
        assert resumed.version_spans == (
            VersionSpan(0, NUM_OLD, version),
            VersionSpan(NUM_OLD, NUM_TOKENS, version + 1),
        ), f"sampled with versions {version} and {version + 1}, but states {resumed.version_spans}"
        context = [*PROMPTS[0], *prior.token_ids.tolist()]
        rest = plain_greedy(new_reference, context, NUM_TOKENS - NUM_OLD)
        assert resumed.token_ids[NUM_OLD:].tolist() == rest
        new = plain_logprobs(new_reference, PROMPTS[0], resumed, resumed.basis)
        assert_logprobs(resumed.logprobs[NUM_OLD:], new[NUM_OLD:], resumed)

    def test_versions_do_not_change_the_draws(self, synced: Replica, tensors: Mapping[str, Tensor]) -> None:
        """Equal weights under another version give equal tokens for equal seeds."""
        self._require_tensors()
        if not self.record().seeded:
            not_applicable("the record does not declare 'seeded'")
        found = []
        for _ in range(2):
            synced.sync(tensors, synced.generator.policy_version + 1)
            [completion] = synced.ask(ask("draw", temperature=1.0, seed=5))
            found.append(completion.token_ids.tolist())
        assert found[0] == found[1], "random numbers are keyed by the policy version"

    def test_a_sync_while_sampling_is_stated_token_by_token(
        self,
        synced: Replica,
        reference: torch.nn.Module,
        new_reference: torch.nn.Module,
        new_model: Path,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Each token of a request that is open during a sync has the version whose weights sampled it; between
        ``begin`` and ``finish`` none is sampled, and ``policy_version`` stays the old one.
        """
        self._require_tensors()
        if kv_after_sync_of(self.record(), self.make_options(dtype="float32")) == "kept":
            not_applicable("with kv_after_sync 'kept' no plain forward gives the tokens after the sync")
        old_version = synced.generator.policy_version + 1
        synced.sync(tensors, old_version)
        new = read_checkpoint(new_model)
        half_way = HalfWay(synced, self.record().streaming, NUM_OLD)

        num_answered = 0
        """How often the answer came while weights were loaded: once, it may have been on its way."""

        async def cross(version: int) -> tuple[bool, Completion]:
            nonlocal num_answered
            loader = synced.generator.loader
            task = await half_way.open(ask(f"cross-{version}", max_tokens=LONG))
            await loader.begin(version, manifest_of(new, loader.expected_manifest().aliases))
            await asyncio.sleep(0)
            was_done = task.done()
            await idle()
            num_answered += task.done() != was_done
            assert synced.generator.policy_version == version - 1, "states the version before it is served"
            await loader.load_tensors(iter(new.items()))
            await loader.finish()
            return was_done, await task

        for _ in range(ATTEMPTS):
            was_done, completion = synced.run(cross(old_version + 1))
            assert num_answered < 2, "requests were answered while weights were being loaded"
            tokens = completion.token_ids.tolist()
            for span in completion.version_spans:
                model = reference if span.version == old_version else new_reference
                context = [*PROMPTS[0], *tokens[: span.start]]
                assert tokens[span.start : span.stop] == plain_greedy(model, context, span.stop - span.start), (
                    f"tokens [{span.start}, {span.stop}) are not of version {span.version}: {completion.version_spans}"
                )
            versions = [span.version for span in completion.version_spans]
            assert versions == sorted(set(versions)), f"versions of the spans: {versions}"
            if len(versions) == 2 or (completion.finish_reason == "abort" and versions):
                return
            half_way.learn(len(tokens) if versions == [old_version] else 0)
            old_version += 2
            synced.sync(tensors, old_version)
        assert was_done, "no token of a request that was open before the sync has the old version"

    def test_requests_held_over_a_failed_sync_fail(
        self, start: Callable[[], Replica], tensors: Mapping[str, Tensor]
    ) -> None:
        """When a sync fails, open requests raise a ``BackendError`` that names them, and the replica stays dead."""
        replica = start()
        loader = replica.generator.loader
        manifest = manifest_of(tensors, loader.expected_manifest().aliases)

        async def fail() -> list[Completion | BaseException]:
            await replica.generator.pause()
            task = asyncio.ensure_future(replica.generator.generate(ask("held", max_tokens=LONG)))
            await asyncio.sleep(0)
            await loader.begin(1, manifest)
            await loader.fail("the sender went away")
            await replica.generator.resume()
            return list(await asyncio.gather(task, return_exceptions=True))

        [outcome] = replica.run(fail())
        assert isinstance(outcome, BackendError), f"a request that was open ended with {outcome!r}"
        assert "held" in str(outcome), f"does not name the request: {outcome}"
        with pytest.raises(WeightSyncError):
            replica.run(loader.begin(2, manifest))
        assert (replica.generator.state, replica.generator.policy_version) == ("dead", 0), (
            "begin revived a dead replica"
        )

    def test_a_sync_has_a_beginning(self, start: Callable[[], Replica], tensors: Mapping[str, Tensor]) -> None:
        """Without an open sync, tensors and ``finish`` raise a ``WeightSyncError``; so does ``begin`` with one open."""
        replica = start()
        loader = replica.generator.loader
        manifest = manifest_of(tensors, loader.expected_manifest().aliases)
        if "tensors" in self.record().channels:
            with pytest.raises(WeightSyncError):
                replica.run(loader.load_tensors(iter(tensors.items())))
        with pytest.raises(WeightSyncError):
            replica.run(loader.finish())
        assert replica.generator.policy_version == 0
        if replica.generator.state == "serving":
            replica.run(loader.begin(1, manifest))
            with pytest.raises(WeightSyncError):
                replica.run(loader.begin(2, manifest))
            assert replica.generator.state != "serving", "serves although a sync is open"

    def test_offloading_keeps_the_synced_weights(
        self,
        synced: Replica,
        new_reference: torch.nn.Module,
        new_model: Path,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """After offload and onload the generator serves the weights of its last sync, not of the model directory; while
        the weights are offloaded, ``begin`` raises a ``WeightSyncError``.
        """
        self._require_tensors()
        version = synced.generator.policy_version + 1
        synced.sync(read_checkpoint(new_model), version)
        loader = synced.generator.loader
        synced.generator.offload({"weights", "kv_cache"})
        try:
            with pytest.raises(WeightSyncError):
                synced.run(loader.begin(version + 1, manifest_of(tensors, loader.expected_manifest().aliases)))
        finally:
            synced.generator.onload({"weights", "kv_cache"})
        request = ask("after")
        [completion] = synced.ask(request)
        assert completion.token_ids.tolist() == plain_greedy(new_reference, PROMPTS[0]), "serves other weights"
        assert_completion(new_reference, request, completion, version)

    def test_tensors_may_be_views(self, synced: Replica, new_reference: torch.nn.Module, new_model: Path) -> None:
        """Tensors may be views into larger ones, with any strides: of a flat bucket, or of a transposed weight.

        Garbage: the generator reads the storage instead of the tensor.
        """
        self._require_tensors()
        new = read_checkpoint(new_model)
        version = synced.generator.policy_version + 1
        loader = synced.generator.loader

        async def load() -> None:
            await loader.begin(version, manifest_of(new, loader.expected_manifest().aliases))
            for name, tensor in new.items():
                view = tensor.t().contiguous().t() if tensor.dim() == 2 else torch.stack([tensor, -tensor], -1)[..., 0]
                await loader.load_tensors([(name, view)])
                view.fill_(float("nan"))
            await loader.finish()

        synced.run(load())
        request = ask("views", PROMPTS[1])
        [completion] = synced.ask(request)
        assert completion.token_ids.tolist() == plain_greedy(new_reference, PROMPTS[1])
        assert_completion(new_reference, request, completion, version)

    def _require_tensors(self) -> None:
        if "tensors" not in self.record().channels:
            not_applicable("the record does not declare the channel 'tensors'")
