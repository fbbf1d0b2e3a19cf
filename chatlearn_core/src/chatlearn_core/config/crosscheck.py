"""Rules between settings: each says which settings disagree, their values, and what to change.

A rule is a function of a valid ``RunConfig`` and the plugins it chose; it yields a ``Problem`` for each conflict. What
needs a file to be opened (models, datasets) is checked when the run starts, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from chatlearn_core.config.choices import Choices
from chatlearn_core.config.models import ModelConfig, RoleConfig, RunConfig
from chatlearn_core.config.problems import KeyPath, Problem, nearest
from chatlearn_core.config.rollout_rules import ROLLOUT_RULES
from chatlearn_core.plugins.compatibility import mismatches, placement_of
from chatlearn_core.plugins.records import (
    AlgorithmSpec,
    GeneratorSpec,
    PluginRecord,
    Reach,
    RuntimeSpec,
    TrainerSpec,
    WeightSyncSpec,
)


@dataclass(slots=True, frozen=True)
class Checked:
    """What rules look at."""

    config: RunConfig
    choices: Choices
    """A plugin that could not be selected is absent, and rules about it say nothing."""
    transports: tuple[WeightSyncSpec, ...] = ()
    """All that are installed: what ``weight_sync.backend: auto`` can pick from."""

    def roles(self, kind: str) -> Iterator[tuple[str, RoleConfig]]:
        """The roles of one kind."""
        return ((name, role) for name, role in self.config.roles.items() if role.kind == kind)

    def model_of(self, name: str) -> tuple[KeyPath, ModelConfig]:
        """The model a role holds, and where it is configured."""
        own = self.config.roles[name].model
        return (("model",), self.config.model) if own is None else (("roles", name, "model"), own)


Rule = Callable[[Checked], Iterator[Problem]]
Related = tuple[tuple[KeyPath, Any], ...]
POLICY = "trainer"
"""The role whose weights the generators serve."""
LOCAL = "local"
"""The runtime that the core brings."""
RecordT = TypeVar("RecordT", bound=PluginRecord)


def crosscheck(checked: Checked) -> list[Problem]:
    """What all rules find."""
    return [problem for rule in RULES for problem in rule(checked)]


def role_names(checked: Checked) -> Iterator[Problem]:
    """A flow calls a role as ``m.<name>``, so its name is an identifier."""
    for name in checked.config.roles:
        if not name.isidentifier() or name.startswith("_"):
            rule = "a role's name must be an identifier that starts with a letter: a flow calls it as m.<name>"
            yield Problem(("roles", name), rule, name, "rename the role")


def backend_given(checked: Checked) -> Iterator[Problem]:
    """Trainers and generators have a backend; a reward role has either a backend or parts."""
    for name, role in checked.config.roles.items():
        path: KeyPath = ("roles", name, "backend")
        if role.kind != "reward":
            if not role.backend:
                rule = f"a {role.kind} role needs a backend"
                yield Problem(path, rule, remedy=f"name an installed {role.kind} (chatlearn plugins list)")
            if role.parts:
                rule = f"only reward roles combine parts; this role is a {role.kind}"
                yield Problem(("roles", name, "parts"), rule, remedy="remove parts")
        elif role.backend and role.parts:
            yield Problem(
                path,
                "a reward role has either a backend or parts, not both",
                role.backend,
                "move the backend into parts, or remove parts",
                ((("roles", name, "parts"), [part.backend for part in role.parts]),),
            )
        elif not role.backend and not role.parts:
            yield Problem(
                path, "a reward role needs a backend, or parts to combine", remedy="name a reward (backend: math)"
            )


def keys_of_other_kinds(checked: Checked) -> Iterator[Problem]:
    """A role sets nothing that its kind does not take."""
    defaults = RoleConfig(kind="trainer")
    taken_by = {
        "head": ("trainer",),
        "trainable": ("trainer",),
        "replicas": ("generator", "reward"),
        "ranks": ("trainer", "generator"),
        "device": ("trainer", "generator"),
        "engine": ("trainer", "generator"),
    }
    why = {
        "head": "the head belongs to a trainer's model",
        "trainable": "only a trainer learns",
        "replicas": "a trainer is one model: copies of it would not learn together",
        "ranks": "a reward runs in one rank",
        "device": "a reward is not placed on one",
        "engine": "a reward has no engine",
    }
    fix = {
        "head": "remove it; a value or reward head is a role of kind trainer",
        "trainable": "remove it",
        "replicas": "use ranks to spread a trainer over devices",
        "ranks": "remove it; for more reward workers use replicas, on a runtime that hosts several",
        "device": "remove it; a reward model is a role of kind trainer with head: reward",
        "engine": "remove it, or set what the reward itself takes under options",
    }
    for name, role in checked.config.roles.items():
        for key, kinds in taken_by.items():
            value = getattr(role, key)
            if value != getattr(defaults, key) and role.kind not in kinds:
                rule = f"a {role.kind} role does not take {key}: {why[key]}"
                yield Problem(("roles", name, key), rule, value, fix[key], ((("roles", name, "kind"), role.kind),))
        if role.parts and role.kind == "reward" and role.options:
            rule = "options is for the one backend of a role, and this role combines parts"
            remedy = "set the options of each part instead (parts.0.options)"
            yield Problem(("roles", name, "options"), rule, role.options, remedy)


def reward_replicas_are_hosted(checked: Checked) -> Iterator[Problem]:
    """The runtime ``local`` calls a reward in its own process: there is one of it."""
    backend = checked.config.runtime.backend
    for name, role in checked.roles("reward"):
        if backend == LOCAL and role.replicas > 1:
            rule = f"the runtime '{LOCAL}' keeps one copy of a reward"
            remedy = "remove replicas, or choose a runtime that hosts several (chatlearn plugins list)"
            related: Related = ((("runtime", "backend"), backend),)
            yield Problem(("roles", name, "replicas"), rule, role.replicas, remedy, related)


def heads_and_ranks(checked: Checked) -> Iterator[Problem]:
    """A trainer backend provides the head and as many ranks as its role asks for."""
    for name, role in checked.roles("trainer"):
        record = _record(checked, f"roles.{name}", TrainerSpec)
        if record is None:
            continue
        backend: Related = ((("roles", name, "backend"), role.backend),)
        if role.head not in record.heads:
            rule = f"trainer '{record.name}' has no {role.head} head; it has: {', '.join(sorted(record.heads))}"
            yield Problem(("roles", name, "head"), rule, role.head, "choose one of these or another trainer", backend)
        if record.max_ranks is not None and role.ranks > record.max_ranks:
            rule = f"trainer '{record.name}' runs in at most {record.max_ranks} rank(s)"
            remedy = f"set ranks to {record.max_ranks}, or choose another trainer"
            yield Problem(("roles", name, "ranks"), rule, role.ranks, remedy, backend)


def algorithm_roles(checked: Checked) -> Iterator[Problem]:
    """Every role that the algorithm calls is there and of the right kind."""
    record = _record(checked, "algorithm", AlgorithmSpec)
    for name, kind in record.roles if record else ():
        role = checked.config.roles.get(name)
        algorithm: Related = ((("algorithm", "name"), checked.config.algorithm.name),)
        if role is None:
            guess = nearest(name, list(checked.config.roles))
            hint = f"is '{guess}' meant? " if guess else ""
            rule = f"the algorithm needs a role '{name}' of kind {kind}"
            yield Problem(("roles", name), rule, remedy=f"{hint}add roles.{name} with kind: {kind}", related=algorithm)
        elif role.kind != kind:
            rule = f"the algorithm needs a {kind} as '{name}'"
            yield Problem(("roles", name, "kind"), rule, role.kind, f"set kind: {kind}", algorithm)


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
    trainer = _record(checked, f"roles.{POLICY}", TrainerSpec)
    transport = _record(checked, "weight_sync", WeightSyncSpec)
    runtime = checked.choices.selected.get("runtime")
    placement: Reach = "process"
    if runtime is not None and isinstance(runtime.record, RuntimeSpec):
        placement = placement_of(runtime.record, runtime.options)
    for name in _policy_generators(checked):
        generator = _record(checked, f"roles.{name}", GeneratorSpec)
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
    record = _record(checked, "algorithm", AlgorithmSpec)
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


def evaluation_has_data(checked: Checked) -> Iterator[Problem]:
    """Asking for evaluation needs something to evaluate on."""
    config = checked.config
    data: Related = ((("data", "eval"), []),)
    if config.data.eval:
        return
    remedy = "add data.eval, or remove this setting"
    if config.eval.every > 0:
        yield Problem(("eval", "every"), "evaluates, but there is no data.eval", config.eval.every, remedy, data)
    if config.eval.sampling is not None:
        rule = "says how to sample for evaluation, but there is no data.eval"
        yield Problem(("eval", "sampling"), rule, remedy=remedy, related=data)


def best_metric_is_produced(checked: Checked) -> Iterator[Problem]:
    """Keeping the best checkpoints needs the metric they are ranked by."""
    config = checked.config
    keep, metric = config.checkpoint.keep_best, config.checkpoint.metric
    if keep == 0 or not metric.startswith("eval/"):
        return
    path: KeyPath = ("checkpoint", "keep_best")
    ranked: tuple[KeyPath, Any] = (("checkpoint", "metric"), metric)
    if not config.data.eval:
        rule = f"ranks checkpoints by '{metric}', which is never measured: there is no data.eval"
        remedy = "add data.eval, set another metric (reward), or set keep_best to 0"
        yield Problem(path, rule, keep, remedy, (ranked, (("data", "eval"), [])))
    elif config.eval.every == 0 and not config.eval.at_end:
        rule = f"ranks checkpoints by '{metric}', which is not measured after training starts"
        related: Related = (ranked, (("eval", "every"), 0), (("eval", "at_end"), False))
        yield Problem(path, rule, keep, "set eval.every, or set keep_best to 0", related)


def completion_fits_model(checked: Checked) -> Iterator[Problem]:
    """Prompt and completion together fit into the longest sequence of the generators' models."""
    config = checked.config
    samplings: list[tuple[KeyPath, int]] = [(("sampling", "max_tokens"), config.sampling.max_tokens)]
    if config.eval.sampling is not None:
        samplings.append((("eval", "sampling", "max_tokens"), config.eval.sampling.max_tokens))
    told: set[tuple[KeyPath, KeyPath]] = set()
    for name, _ in checked.roles("generator"):
        section, model = checked.model_of(name)
        if model.max_length is None:
            continue
        limit_path = (*section, "max_length")
        limit: tuple[KeyPath, Any] = (limit_path, model.max_length)
        for path, tokens in samplings:
            if (path, limit_path) in told:
                continue
            told.add((path, limit_path))
            prompt = config.data.max_prompt_tokens
            if tokens >= model.max_length:
                rule = "leaves no room for a prompt: it must be less than the longest sequence"
                yield Problem(path, rule, tokens, "lower max_tokens or raise max_length", (limit,))
            elif prompt is not None and prompt + tokens > model.max_length:
                rule = (
                    f"{prompt} prompt tokens and {tokens} completion tokens are more than the longest sequence, "
                    f"{model.max_length}"
                )
                related: Related = ((("data", "max_prompt_tokens"), prompt), limit)
                yield Problem(path, rule, tokens, "lower one of the two or raise max_length", related)


def several_samples_differ(checked: Checked) -> Iterator[Problem]:
    """Several completions of one prompt are drawn, not the greedy one repeated."""
    config = checked.config
    several = config.eval.samples_per_prompt
    if several > 1 and config.data.eval and (config.eval.sampling is None or config.eval.sampling.temperature == 0):
        greedy: tuple[KeyPath, Any] = (("eval", "sampling"), None)
        if config.eval.sampling is not None:
            greedy = (("eval", "sampling", "temperature"), config.eval.sampling.temperature)
        rule = f"evaluation is greedy: the {several} samples of a prompt would all be the same"
        remedy = "set eval.sampling with a temperature above 0, or remove samples_per_prompt"
        yield Problem(("eval", "samples_per_prompt"), rule, several, remedy, (greedy,))
    algorithm = checked.choices.selected.get("algorithm")
    group_size = getattr(algorithm.options, "group_size", 1) if algorithm is not None else 1
    if isinstance(group_size, int) and group_size > 1 and config.sampling.temperature == 0:
        rule = f"greedy sampling makes all {group_size} completions of a group the same: no reward differs within it"
        related: Related = ((("algorithm", "options", "group_size"), group_size),)
        remedy = "set a temperature above 0 (1.0 samples from the policy itself), or group_size to 1"
        yield Problem(("sampling", "temperature"), rule, config.sampling.temperature, remedy, related)


def mini_batches_have_samples(checked: Checked) -> Iterator[Problem]:
    """A step has at least one sample for each of its mini-batches."""
    train = checked.config.train
    algorithm = checked.choices.selected.get("algorithm")
    if algorithm is None:
        return
    group_size = getattr(algorithm.options, "group_size", 1)
    if not isinstance(group_size, int) or train.mini_batches <= train.prompts_per_step * group_size:
        return
    samples = train.prompts_per_step * group_size
    related: list[tuple[KeyPath, Any]] = [(("train", "prompts_per_step"), train.prompts_per_step)]
    if hasattr(algorithm.options, "group_size"):
        related.append((("algorithm", "options", "group_size"), group_size))
    rule = f"a step has {samples} samples, fewer than its mini-batches"
    remedy = f"set mini_batches to {samples} or less, or draw more prompts a step"
    yield Problem(("train", "mini_batches"), rule, train.mini_batches, remedy, tuple(related))


def auto_format_takes_no_options(checked: Checked) -> Iterator[Problem]:
    """Options of a dataset belong to a format that is named."""
    data = checked.config.data
    for split, datasets in (("train", data.train), ("eval", data.eval)):
        for index, dataset in enumerate(datasets):
            if dataset.format == "auto" and dataset.options:
                path: KeyPath = ("data", split, index)
                related: Related = (((*path, "format"), "auto"),)
                rule = "options belong to a named format, and format is 'auto'"
                remedy = "name the format, or remove options"
                yield Problem((*path, "options"), rule, dataset.options, remedy, related)


def nothing_is_empty(checked: Checked) -> Iterator[Problem]:
    """Names and paths hold something."""
    config = checked.config
    texts: list[tuple[KeyPath, str | None]] = [
        (("name",), config.name),
        (("output_dir",), config.output_dir),
        (("algorithm", "name"), config.algorithm.name),
        (("weight_sync", "backend"), config.weight_sync.backend),
        (("runtime", "backend"), config.runtime.backend),
        (("checkpoint", "metric"), config.checkpoint.metric),
    ]
    models: list[tuple[KeyPath, ModelConfig | None]] = [(("model",), config.model)]
    models.extend((("roles", name, "model"), role.model) for name, role in config.roles.items())
    for path, model in models:
        if model is not None:
            texts.extend([((*path, "path"), model.path), ((*path, "tokenizer"), model.tokenizer)])
    for split, datasets in (("train", config.data.train), ("eval", config.data.eval)):
        for index, dataset in enumerate(datasets):
            texts.append((("data", split, index, "path"), dataset.path))
            texts.append((("data", split, index, "format"), dataset.format))
    for name, role in config.roles.items():
        texts.extend(
            (("roles", name, "parts", index, "backend"), part.backend) for index, part in enumerate(role.parts)
        )
    texts.extend((("log", "loggers", index, "name"), logger.name) for index, logger in enumerate(config.log.loggers))
    for path, text in texts:
        if text is not None and not text.strip():
            yield Problem(path, "must not be empty", text)


def _record(checked: Checked, key: str, record_type: type[RecordT]) -> RecordT | None:
    record = checked.choices.records.get(key)
    return record if isinstance(record, record_type) else None


RULES: tuple[Rule, ...] = (
    nothing_is_empty,
    role_names,
    backend_given,
    keys_of_other_kinds,
    reward_replicas_are_hosted,
    heads_and_ranks,
    algorithm_roles,
    weight_sync_fits,
    rolling_settings,
    auto_format_takes_no_options,
    evaluation_has_data,
    best_metric_is_produced,
    completion_fits_model,
    several_samples_differ,
    mini_batches_have_samples,
    *ROLLOUT_RULES,
)
"""All rules, in the order in which they are applied."""
