"""Rules about roles: their names, their kinds, and what their backends provide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from chatlearn_config.problems import KeyPath, Problem, nearest
from chatlearn_core.config.models import RoleConfig
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import (
    EnvironmentSpec,
    GeneratorSpec,
    RewardSpec,
    RoleUse,
    RuntimeSpec,
    TrainerSpec,
)


def role_names(checked: Checked) -> Iterator[Problem]:
    """A flow calls a role as ``m.<name>``, so the name must be an identifier."""
    for name in checked.config.roles:
        if not name.isidentifier() or name.startswith("_"):
            rule = "a role's name must be an identifier that starts with a letter: a flow calls it as m.<name>"
            yield Problem(("roles", name), rule, name, "rename the role")


def backend_given(checked: Checked) -> Iterator[Problem]:
    """Trainers and generators need a backend; a reward role needs either a backend or parts."""
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


def gates_are_parts(checked: Checked) -> Iterator[Problem]:
    """A gate names another part of its role, which judges at least the same data sources."""
    for name, role in checked.config.roles.items():
        for index, part in enumerate(role.parts):
            if part.gate is None:
                continue
            path: KeyPath = ("roles", name, "parts", index, "gate", "part")
            other = part.gate.part
            if other == index or other >= len(role.parts):
                rule = "a gate is another part of the same role, by its place from 0"
                what = "this part itself" if other == index else f"no part: there are {len(role.parts)}"
                yield Problem(path, f"{rule}; {other} is {what}", other, "name another part, or remove gate")
                continue
            sources = role.parts[other].data_sources
            if sources is not None and (part.data_sources is None or not set(part.data_sources) <= set(sources)):
                related: Related = ((("roles", name, "parts", other, "data_sources"), sources),)
                rule = "a gate must judge every sample that its part judges, and it judges fewer data sources"
                yield Problem(path, rule, other, "let the gate also judge these data sources", related)


def keys_of_other_kinds(checked: Checked) -> Iterator[Problem]:
    """A role must not set keys that its kind does not take."""
    defaults = RoleConfig(kind="trainer")
    taken_by = {
        "head": ("trainer",),
        "trainable": ("trainer",),
        "refresh": ("trainer",),
        "replicas": ("generator", "reward", "environment"),
        "uses": ("environment", "reward"),
        "max_turns": ("environment",),
        "ranks": ("trainer", "generator"),
        "device": ("trainer", "generator"),
        "engine": ("trainer", "generator"),
    }
    why = {
        "head": "the head belongs to a trainer's model",
        "trainable": "only a trainer learns",
        "refresh": "weight_sync brings weights to generators, and a reward has none",
        "replicas": "a trainer is one model: copies of it would not learn together",
        "ranks": "it runs in one rank",
        "device": "it is not placed on one",
        "engine": "only trainers and generators have engines",
        "uses": "only environments and rewards call other roles",
        "max_turns": "only an environment makes rollouts of several turns",
    }
    fix = {
        "head": "remove it; a value or reward head is a role of kind trainer",
        "trainable": "remove it",
        "refresh": "remove it",
        "replicas": "use ranks to spread a trainer over devices",
        "ranks": "remove it; for more reward workers use replicas, on a runtime that hosts several",
        "uses": "remove it",
        "max_turns": "remove it, or set it for the environment",
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
        if role.parts and role.kind == "reward" and role.uses:
            rule = "uses is for the one backend of a role, and this role combines parts"
            yield Problem(("roles", name, "uses"), rule, role.uses, "set the uses of each part (parts.0.uses)")


def reward_replicas_are_hosted(checked: Checked) -> Iterator[Problem]:
    """A runtime with one process hosts a single copy of each reward and environment."""
    backend = checked.config.runtime.backend
    for name, role in [*checked.roles("reward"), *checked.roles("environment")]:
        if _in_one_process(checked) and role.replicas > 1:
            rule = f"the runtime '{backend}' keeps one copy of a role of kind {role.kind}"
            remedy = "remove replicas, or choose a runtime that hosts several (chatlearn plugins list)"
            related: Related = ((("runtime", "backend"), backend),)
            yield Problem(("roles", name, "replicas"), rule, role.replicas, remedy, related)


def heads_and_ranks(checked: Checked) -> Iterator[Problem]:
    """A trainer backend must provide the head and the number of ranks that its role requests."""
    for name, role in checked.roles("trainer"):
        record = checked.record(f"roles.{name}", TrainerSpec)
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


def engine_arguments(checked: Checked) -> Iterator[Problem]:
    """Refuse engine arguments that a backend does not take, as far as it knows without its engine."""
    for name, role in checked.config.roles.items():
        record = checked.record(f"roles.{name}", TrainerSpec) or checked.record(f"roles.{name}", GeneratorSpec)
        if record is None or not role.engine:
            continue
        backend: Related = ((("roles", name, "backend"), role.backend),)
        path: KeyPath = ("roles", name, "engine")
        if record.check_engine is None:
            rule = f"{record.kind} '{record.name}' takes no engine arguments (its record has no check_engine)"
            yield Problem(path, rule, role.engine, "remove them", backend)
            continue
        try:
            problems = dict(resolve_import_string(record.check_engine)(dict(role.engine)))
        except Exception as error:
            rule = f"{record.kind} '{record.name}' cannot check its engine arguments: {type(error).__name__}: {error}"
            yield Problem(path, rule, role.engine, f"report it to the authors of '{record.name}'", backend)
            continue
        for argument, problem in problems.items():
            rule = f"{record.kind} '{record.name}' does not take this engine argument: {problem}"
            section, _, key = argument.partition(".")
            value = role.engine[section][key] if key else role.engine[argument]
            yield Problem((*path, *filter(None, (section, key))), rule, value, related=backend)


def algorithm_roles(checked: Checked) -> Iterator[Problem]:
    """Every role that the algorithm calls must exist and have the right kind."""
    for name, kind in checked.algorithm_roles or ():
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


def refreshed_roles(checked: Checked) -> Iterator[Problem]:
    """A refreshed role must not be trained, and takes weights of a trainer role that has the same head and is not
    refreshed itself.

    Whether their models match is checked when weights are loaded.
    """
    roles = checked.config.roles
    for name, role in checked.roles("trainer"):
        if role.refresh is None:
            continue
        path: KeyPath = ("roles", name, "refresh", "role")
        source = roles.get(role.refresh.role)
        trainers = [other for other, one in roles.items() if one.kind == "trainer" and other != name]
        remedy = f"name one of: {', '.join(trainers) or 'none is configured'}"
        if source is None or source.kind != "trainer" or role.refresh.role == name:
            yield Problem(path, "a role takes weights from another trainer role", role.refresh.role, remedy)
        elif source.refresh is not None:
            yield Problem(path, "that role takes its weights from another role", role.refresh.role, remedy)
        elif source.head != role.head:
            related: Related = ((("roles", role.refresh.role, "head"), source.head),)
            yield Problem(
                path,
                f"both must have the same head, and this role's is {role.head}",
                role.refresh.role,
                "set head alike, or remove refresh",
                related,
            )
        if role.trainable:
            rule = "a trainable role updates its own weights and cannot take those of another role"
            yield Problem(("roles", name, "refresh"), rule, remedy="remove refresh, or trainable")


def handles_are_roles(checked: Checked) -> Iterator[Problem]:
    """Every handle of an environment or a reward must name a role of a kind that its plugin calls, and every handle
    that the plugin requires must be given.
    """
    for name, role in checked.roles("environment"):
        record = checked.record(f"roles.{name}", EnvironmentSpec)
        further = role.uses if record is not None and record.more_uses else ()
        wanted = None if record is None else {handle: RoleUse() for handle in (*record.uses, *further)}
        yield from _handles(checked, name, ("roles", name), f"environment '{role.backend}'", role.uses, wanted)
    for name, role in checked.roles("reward"):
        if not role.parts:
            reward = checked.record(f"roles.{name}", RewardSpec)
            uses = None if reward is None else _needed(checked, f"roles.{name}", reward)
            yield from _handles(checked, name, ("roles", name), f"reward '{role.backend}'", role.uses, uses)
        for index, part in enumerate(role.parts):
            reward = checked.record(f"roles.{name}.parts.{index}", RewardSpec)
            uses = None if reward is None else _needed(checked, f"roles.{name}.parts.{index}", reward)
            section: KeyPath = ("roles", name, "parts", index)
            yield from _handles(checked, name, section, f"reward '{part.backend}'", part.uses, uses)


def steps_are_rewarded(checked: Checked) -> Iterator[Problem]:
    """A reward of which the algorithm needs rewards of steps (attribute ``needs_steps`` of its options, the name of the
    role) must have a part that gives them.
    """
    choice = checked.choices.selected.get("algorithm")
    name: str | None = getattr(choice.options if choice else None, "needs_steps", None)
    role = checked.config.roles.get(name) if name is not None else None
    if name is None or role is None or role.kind != "reward":
        return
    keys = [f"roles.{name}.parts.{index}" for index in range(len(role.parts))] or [f"roles.{name}"]
    records = [checked.record(key, RewardSpec) for key in keys]
    if None not in records and not any(record.gives_steps for record in records if record is not None):
        rule = f"algorithm {checked.config.algorithm.name!r} is to learn from rewards of steps, and no part gives them"
        remedy = "use a reward that does (such as process), or set algorithm.options.supervision to outcome"
        value = role.backend or [part.backend for part in role.parts]
        yield Problem(("roles", name), rule, value, remedy)


def _needed(checked: Checked, key: str, reward: RewardSpec) -> dict[str, RoleUse]:
    """The handles that a reward needs with the options given."""
    choice = checked.choices.selected.get(key)
    needed = getattr(choice.options if choice else None, "used_handles", reward.uses.keys())
    return {handle: use for handle, use in reward.uses.items() if handle in needed}


def _handles(
    checked: Checked,
    role: str,
    section: KeyPath,
    plugin: str,
    given: Mapping[str, str],
    wanted: Mapping[str, RoleUse] | None,
) -> Iterator[Problem]:
    """Problems with the handles of one plugin.

    Args:
        role: the role with the plugin.
        section: path of the section with ``uses``.
        plugin: kind and name, for messages.
        wanted: handles in the plugin's record; None if unknown.
    """
    path: KeyPath = (*section, "uses")
    for handle, used in given.items():
        found = checked.config.roles.get(used)
        kinds = sorted(wanted[handle].kinds if wanted and handle in wanted else {"generator", "trainer"})
        remedy = f"name a role of kind {' or '.join(kinds)}"
        if used == role:
            rule = f"{plugin} would call its own role by the handle '{handle}': a cycle, {role} -> {role}"
            yield Problem((*path, handle), rule, used, remedy)
        elif found is None or found.kind not in kinds:
            what = "is not defined" if found is None else f"is a {found.kind}"
            guess = nearest(used, list(checked.config.roles)) if found is None else None
            rule = f"{plugin} calls it by the handle '{handle}', so it must be a {' or '.join(kinds)}; it {what}"
            yield Problem((*path, handle), rule, used, f"is '{guess}' meant? {remedy}" if guess else remedy)
    if wanted is not None and set(given) != set(wanted):
        if not wanted:
            yield Problem(path, f"{plugin} calls no other role", dict(given), "remove uses")
            return
        first, use = next(iter(wanted.items()))
        kinds = sorted(frozenset().union(*(each.kinds for each in wanted.values())))
        rule = f"{plugin} needs roles of kind {' or '.join(kinds)} for the handles {', '.join(wanted)}"
        yield Problem(
            path, rule, dict(given), f"assign a role to each handle, such as uses: {{{first}: {min(use.kinds)}}}"
        )


def one_process_hosts_one_rank(checked: Checked) -> Iterator[Problem]:
    """A runtime with one process hosts a single rank per role."""
    backend = checked.config.runtime.backend
    for name, role in checked.config.roles.items():
        if _in_one_process(checked) and role.ranks > 1 and role.kind in ("trainer", "generator"):
            rule = f"the runtime '{backend}' hosts one rank per role, in this process"
            remedy = "set ranks to 1, or choose a distributed runtime (chatlearn plugins list)"
            related: Related = ((("runtime", "backend"), backend),)
            yield Problem(("roles", name, "ranks"), rule, role.ranks, remedy, related)


def _in_one_process(checked: Checked) -> bool:
    """Whether the chosen runtime declares that all roles are in its own process."""
    runtime = checked.record("runtime", RuntimeSpec)
    return runtime is not None and runtime.placement == "process"


ROLE_RULES: tuple[Rule, ...] = (
    role_names,
    backend_given,
    gates_are_parts,
    keys_of_other_kinds,
    reward_replicas_are_hosted,
    steps_are_rewarded,
    heads_and_ranks,
    engine_arguments,
    refreshed_roles,
    handles_are_roles,
    one_process_hosts_one_rank,
    algorithm_roles,
)
