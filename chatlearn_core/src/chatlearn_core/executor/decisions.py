"""All decisions that plugins make in a run: filters, schedules and step policies, with their state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.data import Dataset
from chatlearn_core.exceptions import ChatLearnError, CheckpointError, ConfigError, PluginError
from chatlearn_core.plugins.records import PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Decision, ExampleSampler, SampleFilter, SamplerContext, Schedule, StepPolicy
from chatlearn_core.protocols.data_store import fields_read_by
from chatlearn_core.protocols.decisions import Stateful
from chatlearn_core.runtime.boundary import checked_reward
from chatlearn_core.types import ExampleDraw, Sample, SamplingParams

DEFAULT_SAMPLER = "shuffled"
MAX_TOKENS = "max_tokens"
"""The only sampling parameter that may change during a run; the others determine the distribution of logprobs."""
_OPTIONS = "algorithm.options."
_SAMPLING = f"sampling.{MAX_TOKENS}"


@dataclass(slots=True)
class Decisions:
    """The filters, the sampling schedule and the step policies of a run.

    Each is keyed by its place in the configuration (``train.step_policies.0 (early_stop)``), which messages and
    checkpoints use.
    """

    filters: Mapping[str, SampleFilter] = field(default_factory=dict)
    step_policies: Mapping[str, StepPolicy] = field(default_factory=dict)
    max_tokens: tuple[str, Schedule] | None = None
    """Place and schedule of ``sampling.max_tokens``."""
    decided: dict[str, int] = field(default_factory=dict)
    """Sampling parameters set by step policies."""

    @property
    def reads(self) -> frozenset[str]:
        """The fields of samples that the filters read."""
        return frozenset[str]().union(*(fields_read_by(one) for one in self.filters.values()))

    def exclude(self, samples: Sequence[Sample], seen: Sequence[Sample] | None = None) -> None:
        """Apply the filters in order to the samples that are not yet excluded.

        Args:
            samples: samples of a step; receive the exclusions.
            seen: the same samples as the filters see them, with plain arrays in the fields ``reads``. By default the
                samples themselves.

        Raises:
            PluginError: a filter raised, or named a sample that it was not given.
        """
        for place, one in self.filters.items():
            given = {sample.id: sample for sample in samples if sample.exclusion is None}
            with _named(place):
                excluded = dict(one.excluded([sample for sample in seen or samples if sample.id in given]))
            for sample_id, reason in excluded.items():
                if sample_id not in given or not reason:
                    raise PluginError(
                        f"{place} excludes sample {sample_id!r} for the reason {reason!r}; a filter may only"
                        " name samples that it received, each with a reason"
                    )
                given[sample_id].exclusion = reason
            self._reward(place, one, samples, seen or samples)

    def _reward(self, place: str, one: SampleFilter, samples: Sequence[Sample], seen: Sequence[Sample]) -> None:
        """Put the rewards that a filter changes in their places.

        Raises:
            PluginError: it raised, named a sample that it was not given, or gave a reward that breaks a rule.
        """
        change = getattr(one, "rewards", None)  # absent in a filter that does not subclass the protocol
        if change is None:
            return
        given = {sample.id: sample for sample in samples if sample.exclusion is None}
        with _named(place):
            rewards = dict(change([sample for sample in seen if sample.id in given]))
        shown = {sample.id: sample for sample in seen}
        for sample_id, reward in rewards.items():
            if sample_id not in given:
                raise PluginError(f"{place} gives sample {sample_id!r} a reward; it was not given such a sample")
            checked = checked_reward(reward, given[sample_id])
            if checked.error is not None:
                raise PluginError(f"{place} gives sample {sample_id!r} a reward that cannot be used: {checked.error}")
            given[sample_id].reward = shown[sample_id].reward = checked

    def sampling_at(self, step: int, sampling: SamplingParams) -> SamplingParams:
        """Sampling parameters for the completions of a step.

        Args:
            step: counts from 1.
            sampling: the configured parameters.

        Raises:
            PluginError: a schedule returned a length outside [1, ``sampling.max_tokens``].
        """
        max_tokens = self.decided.get(MAX_TOKENS, sampling.max_tokens)
        if self.max_tokens is not None:
            place, schedule = self.max_tokens
            with _named(place):
                value = schedule.value(step)
            max_tokens = min(max_tokens, _length(place, value, sampling))
        return sampling if max_tokens == sampling.max_tokens else replace(sampling, max_tokens=max_tokens)

    def after_step(self, step: int, line: Mapping[str, float], sampling: SamplingParams) -> Decision:
        """The combined decision of the step policies: all reasons to stop and all metrics.

        Args:
            step: the completed step.
            line: its metrics.
            sampling: the configured parameters.

        Raises:
            PluginError: a policy raised, set a parameter that must not change, or added an existing metric.
        """
        stops: list[str] = []
        metrics: dict[str, float] = {}
        for place, policy in self.step_policies.items():
            with _named(place):
                decision = policy.after_step(step, dict(line))
            if decision is None:
                continue
            if problem := _decision_problem(decision):
                raise PluginError(f"{place} {problem}")
            for name, value in decision.metrics.items():
                if name in line or name in metrics:
                    raise PluginError(f"{place} adds the metric {name!r}, which step {step} has already. Rename it")
                if not isinstance(value, int | float) or not math.isfinite(value):
                    raise PluginError(f"{place} adds the metric {name!r} with the value {value!r}, not a finite number")
                metrics[name] = float(value)
            for name, value in decision.sampling.items():
                if name != MAX_TOKENS:
                    raise PluginError(
                        f"{place} sets sampling.{name}; only {MAX_TOKENS} may change during a run: the others say "
                        "which distribution logprobs are of"
                    )
                self.decided[name] = _length(place, value, sampling)
            if decision.stop is not None:
                stops.append(f"{decision.stop} ({place})")
        return Decision("; ".join(stops) or None, dict(self.decided), metrics)

    def state_dict(self) -> dict[str, Any]:
        """States of all decisions by place, as JSON values.

        Raises:
            PluginError: a state does not consist of JSON values.
        """
        states: dict[str, Any] = {}
        for place, one in self._stateful():
            with _named(place):
                states[place] = one.state_dict()
            try:
                json.dumps(states[place], allow_nan=False)
            except (TypeError, ValueError) as error:
                raise PluginError(f"{place}: its state_dict() cannot be stored as JSON: {error}") from error
        return {"states": states, "decided": dict(self.decided)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states that ``state_dict`` returned.

        Raises:
            CheckpointError: the states belong to other plugins, or a plugin rejects its state.
        """
        states, places = state["states"], dict(self._stateful())
        if states.keys() != places.keys():
            raise CheckpointError(
                f"the checkpoint holds the state of {', '.join(states) or 'nothing'}; this run has "
                f"{', '.join(places) or 'nothing'}. Restore the settings"
            )
        for place, one in places.items():
            with _named(place):
                one.load_state_dict(states[place])
        self.decided = dict(state["decided"])

    def _stateful(self) -> Iterator[tuple[str, Stateful]]:
        yield from self.filters.items()
        yield from self.step_policies.items()


def build_decisions(loaded: LoadedConfig, registry: PluginRegistry) -> Decisions:
    """The filters, the sampling schedule and the step policies named in the configuration."""
    filters = {place: make() for place, make in _chosen(loaded, registry, ("rollout", "filters"))}
    policies = {place: make() for place, make in _chosen(loaded, registry, ("train", "step_policies"))}
    schedules = build_schedules(loaded, registry)
    return Decisions(filters, policies, schedules.get(_SAMPLING))


def build_schedules(loaded: LoadedConfig, registry: PluginRegistry) -> dict[str, tuple[str, Schedule]]:
    """Setting -> its place in the configuration and its schedule.

    Raises:
        ConfigError: a setting has two schedules, or cannot change during a run.
    """
    found: dict[str, tuple[str, Schedule]] = {}
    configured = loaded.config.schedules
    for choice, (place, make) in zip(configured, _chosen(loaded, registry, ("schedules",)), strict=True):
        setting = choice.setting
        if setting in found:
            raise ConfigError(f"{place} and {found[setting][0]} both schedule {setting!r}. Remove one of them")
        if setting != _SAMPLING and not setting.startswith(_OPTIONS):
            raise ConfigError(
                f"{place} schedules {setting!r}; what can change during a run is {_SAMPLING} and those options of the "
                f"algorithm that it takes ({_OPTIONS}<name>)"
            )
        found[setting] = (place, make())
    return found


def option_schedules(loaded: LoadedConfig, registry: PluginRegistry) -> dict[str, Schedule]:
    """Option of the algorithm -> its schedule."""
    schedules = build_schedules(loaded, registry)
    return {
        setting.removeprefix(_OPTIONS): schedule
        for setting, (_, schedule) in schedules.items()
        if setting.startswith(_OPTIONS)
    }


def build_sampler(loaded: LoadedConfig, registry: PluginRegistry, datasets: Sequence[Dataset]) -> ExampleSampler:
    """The sampler that ``data.sampler`` names, at the start of its stream.

    Raises:
        PluginNotFoundError: nothing installed provides it; the default one is in chatlearn-data.
    """
    choice = loaded.chosen("data", "sampler")
    context = SamplerContext(datasets, loaded.config.seed, loaded.config.data.shuffle)
    record: PluginRecord
    if choice is None:
        record = registry.select("sampler", DEFAULT_SAMPLER, "data.sampler")
        options = registry.load_options(record)()
    else:
        record, options = choice.record, choice.options
    with _named(f"data.sampler ({record.name})"):
        sampler: ExampleSampler = registry.load_factory(record)(options, context)
    return sampler


def _chosen(
    loaded: LoadedConfig, registry: PluginRegistry, section: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Place and builder of each plugin in a list of the configuration."""
    index = 0
    while (choice := loaded.chosen(*section, index)) is not None:
        place = f"{'.'.join(section)}.{index} ({choice.record.name})"

        def make(record: Any = choice.record, options: Any = choice.options, place: str = place) -> Any:
            with _named(place):
                return registry.load_factory(record)(options)

        yield place, make
        index += 1


def _decision_problem(decision: Any) -> str | None:
    """What a step policy returned instead of a decision; None if it is one."""
    if not isinstance(decision, Decision):
        return f"returned a {type(decision).__name__}; after_step returns a Decision or None"
    if decision.stop is not None and not isinstance(decision.stop, str):
        return f"stops the run for the reason {decision.stop!r:.80}, which is no text"
    for name, values in (("sampling", decision.sampling), ("metrics", decision.metrics)):
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            return f"returned a Decision whose {name} is {values!r:.80}; it is a mapping from names to values"
    return None


def next_draws(sampler: ExampleSampler, size: int) -> list[ExampleDraw]:
    """The next examples of a sampler.

    Raises:
        PluginError: it did not return as many draws as were asked for.
    """
    draws = sampler.next_batch(size)
    if not isinstance(draws, list | tuple) or [type(one) for one in draws] != [ExampleDraw] * size:
        raise PluginError(
            f"sampler {type(sampler).__qualname__}: next_batch({size}) returned {draws!r:.80}; it is a list of {size} "
            "ExampleDraw"
        )
    return list(draws)


def _length(place: str, value: Any, sampling: SamplingParams) -> int:
    if not isinstance(value, int | float) or not math.isfinite(value) or not 1 <= int(value) <= sampling.max_tokens:
        raise PluginError(
            f"{place} sets sampling.{MAX_TOKENS} to {value!r}; it must be from 1 to {sampling.max_tokens}, the number "
            "that the configuration plans room for"
        )
    return int(value)


@contextmanager
def _named(place: str) -> Iterator[None]:
    """A plugin's own errors begin with its place; any other exception becomes an error that names the place."""
    try:
        yield
    except ChatLearnError as error:
        raise type(error)(f"{place}: {error}") from error
    except Exception as error:
        raise PluginError(f"{place} raised {type(error).__name__}: {error}") from error
