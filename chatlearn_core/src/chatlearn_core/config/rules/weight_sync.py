"""Rules between the section ``weight_sync`` and the two ends that it connects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.plugins.compatibility import RoleSize, mismatches, placement_of
from chatlearn_core.plugins.records import Export, GeneratorSpec, Placement, RuntimeSpec, TrainerSpec, WeightSyncSpec


class Asked(TypedDict):
    """The requests of the section."""

    export: Export | None
    rolling: bool


def weight_sync_fits(checked: Checked) -> Iterator[Problem]:
    """The transport must fit the policy's trainer and every generator that samples from it; under 'auto', one must fit.

    The chosen runtime determines the distance between the ends.
    """
    sync = checked.config.weight_sync
    path: KeyPath = ("weight_sync", "backend")
    asked: Asked = {"export": None if sync.export == "auto" else sync.export, "rolling": sync.fleet_rule == "rolling"}
    if sync.backend == "auto" and sync.options:
        rule = "options belong to a named transport, and backend is 'auto'"
        related: Related = ((path, "auto"),)
        yield Problem(("weight_sync", "options"), rule, sync.options, "name the backend, or remove options", related)
    policy = _policy(checked)
    trainer = None if policy is None else checked.record(f"roles.{policy}", TrainerSpec)
    transport = checked.record("weight_sync", WeightSyncSpec)
    runtime = checked.choices.selected.get("runtime")
    for name in _policy_generators(checked):
        generator = checked.record(f"roles.{name}", GeneratorSpec)
        if policy is None or trainer is None or generator is None:
            continue
        placement: Placement = "process"
        devices = [checked.config.roles[role].device for role in (policy, name)]
        if runtime is not None and isinstance(runtime.record, RuntimeSpec):
            roles = checked.config.roles
            sizes = [
                RoleSize.of(role, record.kind, roles[role], record)
                for role, record in ((policy, trainer), (name, generator))
            ]
            placement = placement_of(runtime.record, runtime.options, *sizes)
        ends: Related = ((("roles", policy, "backend"), trainer.name), (("roles", name, "backend"), generator.name))
        if transport is not None:
            remedy = "choose another transport, or 'auto' (chatlearn plugins matrix shows what fits together)"
            reasons = mismatches(trainer, generator, transport, placement, sync.payload, **asked, devices=devices)
        elif sync.backend == "auto":
            remedy = "install a transport that fits, or choose another backend (chatlearn plugins matrix)"
            offers = [
                mismatches(trainer, generator, one, placement, sync.payload, **asked, devices=devices)
                for one in checked.transports
            ]
            fits = any(not offer for offer in offers)
            reasons = [] if fits else ["no installed transport fits", *(line for offer in offers for line in offer)]
        else:
            continue
        if reasons:
            yield Problem(path, "\n".join(reasons), sync.backend, remedy, ends)


def _policy(checked: Checked) -> str | None:
    """The role whose weights the generators serve, if the algorithm's record shows it: the only language model among
    the trainers that it calls. If there are several, only the algorithm itself knows; planning checks that later.
    """
    roles = checked.config.roles
    called = [name for name, kind in checked.algorithm_roles or () if kind == "trainer" and name in roles]
    learners = [name for name in called if roles[name].head == "lm" and roles[name].trainable is not False]
    return learners[0] if len(learners) == 1 else None


def _policy_generators(checked: Checked) -> list[str]:
    """The generators that sample from the policy: those without their own model."""
    return [name for name, role in checked.roles("generator") if role.model is None]


def rolling_settings(checked: Checked) -> Iterator[Problem]:
    """The number of replicas that load at a time applies only to the fleet rule 'rolling'."""
    sync = checked.config.weight_sync
    if sync.fleet_rule == "barrier" and sync.max_loading > 1:
        related: Related = ((("weight_sync", "fleet_rule"), sync.fleet_rule),)
        rule = "limits how many replicas load weights at a time, but with 'barrier' all load together"
        remedy = "remove it, or set fleet_rule: rolling"
        yield Problem(("weight_sync", "max_loading"), rule, sync.max_loading, remedy, related)


WEIGHT_SYNC_RULES: tuple[Rule, ...] = (weight_sync_fits, rolling_settings)
