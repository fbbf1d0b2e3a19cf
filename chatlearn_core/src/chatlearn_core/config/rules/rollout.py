"""Rules between the section ``rollout`` and the generators, the algorithm and other settings that it depends on."""

from __future__ import annotations

from collections.abc import Iterator

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.models import SYNC
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.plugins.compatibility import kv_after_sync_of
from chatlearn_core.plugins.records import AlgorithmSpec, GeneratorSpec, RolloutModeSpec


def stealing_has_queues(checked: Checked) -> Iterator[Problem]:
    """Work stealing requires that requests can wait for a replica."""
    rollout = checked.config.rollout
    if rollout.work_stealing and rollout.max_concurrent is None:
        rule = "takes over what waits in front of a replica, but without max_concurrent every request starts at once"
        related: Related = ((("rollout", "max_concurrent"), None),)
        yield Problem(("rollout", "work_stealing"), rule, True, "set rollout.max_concurrent, or remove it", related)


def partial_settings(checked: Checked) -> Iterator[Problem]:
    """Settings of partial rollouts must belong to the chosen mode, and leave it something to do."""
    config, rollout = checked.config, checked.config.rollout
    partial: Related = ((("rollout", "partial"), rollout.partial),)
    tokens: KeyPath = ("rollout", "round_tokens")
    if rollout.partial == "resume":
        longest: Related = ((("sampling", "max_tokens"), config.sampling.max_tokens),)
        if rollout.round_tokens is None:
            rule = "'rollout.partial: resume' needs the number of tokens after which a round ends"
            yield Problem(tokens, rule, remedy="set it, for example to a quarter of sampling.max_tokens")
        elif rollout.round_tokens >= config.sampling.max_tokens:
            rule = "a round is as long as the longest completion, so no completion would be resumed"
            yield Problem(tokens, rule, rollout.round_tokens, "lower it, or set rollout.partial: none", longest)
    elif rollout.round_tokens is not None:
        rule = "sets the length of a round, which only 'rollout.partial: resume' has"
        yield Problem(tokens, rule, rollout.round_tokens, "remove it, or set rollout.partial: resume", partial)
    in_flight: KeyPath = ("rollout", "in_flight_prompts")
    per_step: Related = ((("train", "prompts_per_step"), config.train.prompts_per_step),)
    if rollout.partial == "none" and rollout.in_flight_prompts is not None:
        rule = "applies to partial rollouts only; without them a step generates train.prompts_per_step prompts"
        yield Problem(in_flight, rule, rollout.in_flight_prompts, "remove it, or set rollout.partial", partial)
    if rollout.partial == "keep" and (rollout.in_flight_prompts or 2 * config.train.prompts_per_step) <= (
        config.train.prompts_per_step
    ):
        rule = (
            "a step of 'keep' ends when prompts_per_step prompts are complete: with no more in flight it waits for all"
        )
        yield Problem(in_flight, rule, rollout.in_flight_prompts, "raise it above prompts_per_step", per_step)
    if rollout.partial != "none" and rollout.max_staleness is not None:
        oldest = rollout.max_rounds - 1
        if rollout.max_staleness < oldest:
            stale: KeyPath = ("rollout", "max_staleness")
            rounds: Related = ((("rollout", "max_rounds"), rollout.max_rounds),)
            rule = f"a completion of {rollout.max_rounds} steps has tokens that are {oldest} policy versions old"
            remedy = f"raise it to {oldest}, remove it, or lower rollout.max_rounds"
            yield Problem(stale, rule, rollout.max_staleness, remedy, rounds)
    if rollout.partial == "keep" and rollout.request_timeout_s is not None:
        rule = "would also count the time during which 'keep' pauses a request for updates and weight syncs"
        path: KeyPath = ("rollout", "request_timeout_s")
        yield Problem(path, rule, rollout.request_timeout_s, "remove it, or set rollout.partial: resume", partial)


def partial_is_supported(checked: Checked) -> Iterator[Problem]:
    """The policy's generators must be able to resume a completion, or to keep it over a weight sync."""
    rollout = checked.config.rollout
    path: KeyPath = ("rollout", "partial")
    for name, role in checked.roles("generator"):
        record = checked.record(f"roles.{name}", GeneratorSpec)
        if rollout.partial == "none" or role.model is not None or record is None:
            continue
        backend: Related = ((("roles", name, "backend"), role.backend),)
        if rollout.partial == "resume" and not record.resumable:
            rule = f"generator '{record.name}' does not resume completions (resumable in its plugin record)"
            yield Problem(path, rule, rollout.partial, "choose another generator, or none", backend)
        chosen = checked.choices.selected.get(f"roles.{name}")  # missing if its options were refused
        if rollout.partial == "keep" and chosen and kv_after_sync_of(record, chosen.options) == "dropped":
            rule = f"generator '{record.name}' ends unfinished requests at a weight sync (kv_after_sync: dropped)"
            yield Problem(path, rule, rollout.partial, "choose another generator, resume, or none", backend)


def mode_settings(checked: Checked) -> Iterator[Problem]:
    """Options belong to a mode that is a plugin, and such a mode has no partial rollouts beside it."""
    rollout = checked.config.rollout
    mode: Related = ((("rollout", "mode"), rollout.mode),)
    if rollout.mode == SYNC and rollout.options:
        rule = f"mode {SYNC!r} takes no options"
        yield Problem(("rollout", "options"), rule, rollout.options, "remove them, or set rollout.mode", mode)
    if rollout.mode != SYNC and rollout.partial != "none":
        rule = "partial rollouts belong to steps that wait for rollouts; this mode goes on with them by itself"
        yield Problem(("rollout", "partial"), rule, rollout.partial, "remove it, or set rollout.mode: sync", mode)


def stale_tokens_are_corrected(checked: Checked) -> Iterator[Problem]:
    """The algorithm must train a token sampled by older weights against the logprob with which it was sampled.

    An algorithm's options model may declare this in an attribute ``stale_tokens``: None if it does, otherwise the
    options that decide it and the values to set.
    """
    rollout = checked.config.rollout
    algorithm = checked.choices.selected.get("algorithm")
    setting = "max_staleness" if rollout.partial == "none" else "partial"
    value = getattr(rollout, setting)
    mode = checked.record("rollout", RolloutModeSpec)
    if mode is not None and value is None and mode.max_staleness:
        setting, value = "mode", mode.name
    if not value or value == "none" or algorithm is None or not isinstance(algorithm.record, AlgorithmSpec):
        return
    told: tuple[tuple[str, ...], str] | None = getattr(algorithm.options, "stale_tokens", None)
    if told is not None:
        names, remedy = told
        related: Related = tuple((("algorithm", "options", name), getattr(algorithm.options, name)) for name in names)
        rule = "the run trains on tokens sampled by older weights, and this algorithm would treat them as on-policy"
        yield Problem(("rollout", setting), rule, value, remedy, related)


ROLLOUT_RULES: tuple[Rule, ...] = (
    stealing_has_queues,
    partial_settings,
    partial_is_supported,
    mode_settings,
    stale_tokens_are_corrected,
)
