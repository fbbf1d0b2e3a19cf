"""Rules between the section ``weight_sync`` and the two ends that it joins."""

from __future__ import annotations

from collections.abc import Iterator

from chatlearn_core.config.problems import KeyPath, Problem
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.plugins.compatibility import mismatches, placement_of
from chatlearn_core.plugins.records import AlgorithmSpec, GeneratorSpec, Reach, RuntimeSpec, TrainerSpec, WeightSyncSpec

POLICY = "trainer"
"""The role whose weights the generators serve."""


def weight_sync_fits(checked: Checked) -> Iterator[Problem]:
    """The transport suits the policy's trainer and every generator that samples from it; under 'auto', one does.

    The ends are as far apart as the chosen runtime may put them.
    """
    sync = checked.config.weight_sync
    path: KeyPath = ("weight_sync", "backend")
    rolling = sync.fleet_rule == "rolling"
    if sync.backend == "auto" and sync.options:
        rule = "options belong to a named transport, and backend is 'auto'"
        related: Related = ((path, "auto"),)
        yield Problem(("weight_sync", "options"), rule, sync.options, "name the backend, or remove options", related)
    trainer = checked.record(f"roles.{POLICY}", TrainerSpec)
    transport = checked.record("weight_sync", WeightSyncSpec)
    runtime = checked.choices.selected.get("runtime")
    placement: Reach = "process"
    if runtime is not None and isinstance(runtime.record, RuntimeSpec):
        placement = placement_of(runtime.record, runtime.options)
    for name in _policy_generators(checked):
        generator = checked.record(f"roles.{name}", GeneratorSpec)
        if trainer is None or generator is None:
            continue
        ends: Related = (
            (("roles", POLICY, "backend"), trainer.name),
            (("roles", name, "backend"), generator.name),
        )
        if transport is not None:
            remedy = "choose another transport, or 'auto' (chatlearn plugins matrix shows what fits together)"
            reasons = mismatches(trainer, generator, transport, placement, sync.payload, rolling=rolling)
        elif sync.backend == "auto":
            remedy = "install a transport that fits, or choose another backend (chatlearn plugins matrix)"
            offers = [
                mismatches(trainer, generator, one, placement, sync.payload, rolling=rolling)
                for one in checked.transports
            ]
            fits = any(not offer for offer in offers)
            reasons = [] if fits else ["no installed transport fits", *(line for offer in offers for line in offer)]
        else:
            continue
        if reasons:
            yield Problem(path, "\n".join(reasons), sync.backend, remedy, ends)


def _policy_generators(checked: Checked) -> list[str]:
    """The generators that sample from the policy: those the algorithm calls; where it calls none, the usual one."""
    record = checked.record("algorithm", AlgorithmSpec)
    called = [name for name, kind in record.roles if kind == "generator"] if record else []
    return called or ["generator"]


def rolling_settings(checked: Checked) -> Iterator[Problem]:
    """How many replicas load at a time is a matter of the fleet rule 'rolling'."""
    sync = checked.config.weight_sync
    if sync.fleet_rule == "barrier" and sync.max_loading > 1:
        related: Related = ((("weight_sync", "fleet_rule"), sync.fleet_rule),)
        rule = "says how many replicas change at a time, but under 'barrier' all do"
        remedy = "remove it, or set fleet_rule: rolling"
        yield Problem(("weight_sync", "max_loading"), rule, sync.max_loading, remedy, related)


WEIGHT_SYNC_RULES: tuple[Rule, ...] = (
    weight_sync_fits,
    rolling_settings,
)
