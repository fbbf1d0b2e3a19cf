"""Whether a configuration suits a rollout mode, and what the plan of its run says about it."""

from __future__ import annotations

from chatlearn_async.options import AsyncOptions, DuringSync, OneStepOffOptions
from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.flow import Graph
from chatlearn_core.plugins.compatibility import kv_after_sync_of
from chatlearn_core.plugins.records import GeneratorSpec
from chatlearn_core.protocols import AtSync

_KV_TEXT = {
    "recomputed": "stay in the engine, which recomputes their KV cache under the new weights",
    "kept": "stay in the engine with the KV cache of the old weights",
}


def one_step_off(options: OneStepOffOptions, loaded: LoadedConfig, graph: Graph) -> list[str]:
    """Lines of the plan.

    Raises:
        ConfigError: the flow generates nothing, or another staleness than 1 is set.
    """
    _check_generates(loaded, graph)
    staleness = loaded.config.rollout.max_staleness
    if staleness not in (None, 1):
        raise ConfigError(
            f"{loaded.source}: rollout.max_staleness is {staleness}, but with rollout.mode one_step_off every token is "
            "one policy version old. Remove it, or set rollout.mode: async"
        )
    return [
        "one_step_off: the rollouts of the next step are made while a step trains",
        "at a weight sync: wait for these rollouts, so that each completion is of one policy version",
        *_turns_lines(graph, together=True),
    ]


def asynchronous(options: AsyncOptions, loaded: LoadedConfig, graph: Graph) -> list[str]:
    """Lines of the plan.

    Raises:
        ConfigError: the flow generates nothing, or a generator cannot do at a weight sync what is configured.
    """
    _check_generates(loaded, graph)
    staleness = loaded.config.rollout.max_staleness
    staleness = 1 if staleness is None else staleness
    together = turns_together(options, staleness, loaded.source)
    turns = _turns_lines(graph, together)
    if staleness == 0:
        return ["async with max_staleness 0: rollouts and updates take turns, as in sync", *turns]
    how = during_sync(options, loaded, graph)
    lines = [
        f"async: rollouts are made up to {staleness} step(s) ahead; tokens are at most {staleness} policy version(s) "
        "old when they are trained on",
        *turns,
    ]
    if how == "wait":
        return [*lines, "at a weight sync: wait until every rollout has ended"]
    which = "unfinished completions"
    if how == "continue":
        lines.append("at a weight sync: completions go on, except on the replicas whose turn it is to load weights")
        which += " of these replicas"
    for role in serving_generators(loaded):
        choice = loaded.plugin("roles", role)
        assert isinstance(choice.record, GeneratorSpec)
        text = "are aborted and resume from their tokens under the new weights"
        if how == "continue":
            text = "are aborted and resume from their tokens on other replicas"
        if at_sync(how, loaded) == "pause":
            text = _KV_TEXT[kv_after_sync_of(choice.record, choice.options)]
            if how == "pause" and abort_problem(loaded) is None and loaded.config.checkpoint.every:
                text += "; before a checkpoint they are aborted and resume, so that it has their tokens"
        lines.append(f"at a weight sync: {which} of {role} ({choice.record.name}) {text}")
    if options.replay is not None:
        lines.append(f"repeats the run that recorded {options.replay}")
    elif not is_repeatable(how, loaded):
        lines.append("rollout.options.replay cannot repeat this run: completions stay in the engine at a weight sync")
    return lines


def during_sync(options: AsyncOptions, loaded: LoadedConfig, graph: Graph) -> DuringSync:
    """What becomes of unfinished completions at a weight sync; ``auto`` is decided by what the generators declare.

    Raises:
        ConfigError: a generator or the flow does not permit what is configured; names the role and the remedy.
    """
    key = f"{loaded.source}: rollout.options.during_sync"
    problems = {"abort": abort_problem(loaded), "pause": _pause_problem(loaded)}
    problems["continue"] = _turns_problem(loaded) or (problems["pause"] and problems["abort"])
    if used := _used_generator(loaded, graph):
        problems = dict.fromkeys(problems, used)
    how: DuringSync = "wait"
    if options.during_sync != "auto":
        how = options.during_sync
        problem = problems.get(how)
        if problem is not None:
            raise ConfigError(f"{key} is {how!r}, but {problem}. Set it to auto, or to wait")
    elif problems["continue"] is None and options.replay is None:
        how = "continue"
    elif problems["abort"] is None:
        how = "abort"
    elif problems["pause"] is None:
        how = "pause"
    if options.replay is not None:
        _check_replay(how, loaded)
    return how


def turns_together(options: AsyncOptions, staleness: int, source: str) -> bool:
    """Whether concurrent rollouts of an environment proceed together.

    Raises:
        ConfigError: they are to go on at once although the run is reproducible, or together although another run, in
            which timing mattered, is repeated.
    """
    key = f"{source}: rollout.options.turns"
    if options.turns == "free" and staleness == 0:
        raise ConfigError(
            f"{key} is 'free', but with rollout.max_staleness 0 a run equals one with rollout.mode: sync bit for bit, "
            "so what the generator batches must not depend on how long tools take. Remove turns, or raise max_staleness"
        )
    if options.turns == "together" and options.replay is not None:
        raise ConfigError(
            f"{key} is 'together', but the record of rollout.options.replay says when each turn was sampled. Remove "
            "turns"
        )
    return options.turns == "together" or (options.turns == "auto" and staleness == 0)


def _turns_lines(graph: Graph, together: bool) -> list[str]:
    """What the plan says about the turns of environments, if the flow has one."""
    if not any(node.kind == "environment" for node in graph.nodes):
        return []
    if together:
        return ["turns: rollouts of a step ask for their next turn together; the slowest tool delays them all"]
    return ["turns: each rollout asks for its next turn at once; a slow tool delays no other rollout"]


def at_sync(how: DuringSync, loaded: LoadedConfig) -> AtSync:
    """What interrupts completions: ``abort``, if how is ``continue`` and the generators permit both."""
    if how == "continue":
        return "pause" if abort_problem(loaded) else "abort"
    return "none" if how == "wait" else how


def is_repeatable(how: DuringSync, loaded: LoadedConfig) -> bool:
    """Whether a record of the tokens' versions suffices to repeat the run with ``replay``.

    It does where completions are aborted and resume from their tokens. An engine that keeps its KV cache computes
    tokens under new weights from keys and values of old ones, which a repetition would not have.
    """
    return at_sync(how, loaded) == "abort"


def serving_generators(loaded: LoadedConfig) -> list[str]:
    """The generator roles that serve the run's model."""
    return [name for name, role in loaded.config.roles.items() if role.kind == "generator" and role.model is None]


def _check_generates(loaded: LoadedConfig, graph: Graph) -> None:
    if not any(node.kind in ("generator", "environment") for node in graph.nodes):
        raise ConfigError(
            f"{loaded.source}: rollout.mode is {loaded.config.rollout.mode!r}, but the flow of algorithm "
            f"{loaded.config.algorithm.name!r} generates nothing. Set rollout.mode: sync"
        )


def _turns_problem(loaded: LoadedConfig) -> str | None:
    rule = loaded.config.weight_sync.fleet_rule
    if rule == "rolling":
        return None
    return (
        f"weight_sync.fleet_rule is {rule!r}, with which all replicas load at once. Set it to rolling, which lets them "
        "load in turns"
    )


def abort_problem(loaded: LoadedConfig) -> str | None:
    """Why completions cannot be aborted and resumed; None if they can."""
    for role in serving_generators(loaded):
        record = loaded.plugin("roles", role).record
        assert isinstance(record, GeneratorSpec)
        if not record.resumable:
            return f"generator {record.name!r} (roles.{role}) does not resume completions (resumable in its record)"
    return None


def _pause_problem(loaded: LoadedConfig) -> str | None:
    if loaded.config.rollout.request_timeout_s is not None:
        return "rollout.request_timeout_s would also count the time of the pause"
    for role in serving_generators(loaded):
        choice = loaded.plugin("roles", role)
        assert isinstance(choice.record, GeneratorSpec)
        if kv_after_sync_of(choice.record, choice.options) == "dropped":
            return (
                f"generator {choice.record.name!r} (roles.{role}) ends unfinished requests at a weight sync "
                "(kv_after_sync: dropped)"
            )
    return None


def _used_generator(loaded: LoadedConfig, graph: Graph) -> str | None:
    """Why requests of a generator cannot be interrupted: a reward makes them itself."""
    serving = set(serving_generators(loaded))
    for node in graph.nodes:
        if node.kind != "environment" and (used := sorted(serving & set(node.uses))):
            return f"roles.{node.role} sends requests of its own to roles.{used[0]}, which do not resume"
    return None


def _check_replay(how: DuringSync, loaded: LoadedConfig) -> None:
    key = f"{loaded.source}: rollout.options.replay"
    if how != "abort":
        raise ConfigError(
            f"{key} repeats where completions were interrupted, which only during_sync: abort determines; it is "
            f"{how!r}. Remove replay, or set during_sync: abort with a generator that resumes completions"
        )
    if loaded.config.rollout.work_stealing:
        raise ConfigError(f"{key} needs batches that do not depend on timing: set rollout.work_stealing: false")
