"""Checks before a run starts that rewards can judge against the ground truths of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chatlearn_core.flow import Graph
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import RewardSpec
from chatlearn_core.runtime.plan import RunPlan
from chatlearn_core.types import Prompt


@dataclass(slots=True, frozen=True)
class _Check:
    """One reward's check of ground truths."""

    problem: Callable[[Any, Any], str | None]
    options: Any
    reward: str
    """Name and role, for messages."""
    data_sources: frozenset[str] | None


def ground_truth_check(graph: Graph, plan: RunPlan) -> Callable[[Prompt], str | None]:
    """A function that returns the reason why a reward of ``graph`` cannot judge completions of a prompt, or None.

    It asks only rewards that judge the prompt's data source and whose record has ``check_ground_truth``.
    """
    checks = [
        _Check(
            resolve_import_string(backend.record.check_ground_truth),
            backend.options,
            f"reward {backend.record.name!r} of role {name!r}",
            backend.data_sources,
        )
        for name in graph.roles
        for backend in plan.roles[name].backends
        if isinstance(backend.record, RewardSpec) and backend.record.check_ground_truth is not None
    ]

    def problem(prompt: Prompt) -> str | None:
        for check in checks:
            if check.data_sources is None or prompt.data_source in check.data_sources:
                reason = check.problem(check.options, prompt.ground_truth)
                if reason is not None:
                    return f"{check.reward}: prompt {prompt.id!r} {reason}"
        return None

    return problem
