"""Every hook is documented, its example works, and a check of its own says so."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_core.flow import Graph
from chatlearn_core.plugins import hookspec
from chatlearn_core.plugins.loader import load_plugins
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.plugins.records import RECORD_TYPES
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.sources import DisabledDistributions, PluginSource
from chatlearn_core.plugins.validation import REGISTERING_HOOKS
from chatlearn_core.protocols import PlainData
from chatlearn_core.types import Prompt, RunFailure, Sample, SyncReceipt

SAMPLE = Sample("p@1#0", "p@1", Prompt("p", np.array([1]), "?"), np.array([1, 2]), np.array([False, True]))
GRAPH = Graph("reading", (), {})
FAILURE = RunFailure("mine", "scoring", 1.0, 3, 2, 9, "Nothing is saved.", Path("runs/mine"), (), 5.0, {})
HOOKS = [name for name in vars(hookspec) if name.startswith("chatlearn_")]
Check = Callable[[PluginRegistry, types.ModuleType, Path], None]


def registers(kind: str, name: str) -> Check:
    """The example registers one plugin of that kind and name, which is fit for use."""

    def check(registry: PluginRegistry, module: types.ModuleType, tmp_path: Path) -> None:
        (entry,) = registry.entries
        assert (entry.kind, entry.name, entry.status, entry.reason) == (kind, name, "ok", "")

    return check


def observes(
    call: Callable[[Observers, Path], None], seen: Callable[[types.ModuleType, Path], Any], value: Any
) -> Check:
    """The example, called as a run would, has the stated effect."""

    def check(registry: PluginRegistry, module: types.ModuleType, tmp_path: Path) -> None:
        assert registry.entries == ()
        call(registry.observers, tmp_path)
        assert seen(module, tmp_path) == value
        assert not registry.observers.failures

    return check


RECEIPTS = [SyncReceipt(replica=0, policy_version=4, state="serving"), SyncReceipt(1, 4, "dead", error="lost")]
CHECKS: dict[str, Check] = {
    "chatlearn_cli_commands": registers("cli_command", "acme"),
    "chatlearn_runtimes": registers("runtime", "slurm"),
    "chatlearn_model_families": registers("model_family", "acme"),
    "chatlearn_datasets": registers("dataset", "acme_tickets"),
    "chatlearn_example_kinds": registers("example_kind", "rewrites"),
    "chatlearn_algorithms": registers("algorithm", "acme_po"),
    "chatlearn_environments": registers("environment", "browser"),
    "chatlearn_tools": registers("tool", "timetable"),
    "chatlearn_launchers": registers("launcher", "lsf"),
    "chatlearn_trainers": registers("trainer", "acme"),
    "chatlearn_generators": registers("generator", "acme"),
    "chatlearn_rewards": registers("reward", "unit_tests"),
    "chatlearn_weight_syncs": registers("weight_sync", "nfs"),
    "chatlearn_loggers": registers("logger", "statsd"),
    "chatlearn_samplers": registers("sampler", "easy_first"),
    "chatlearn_sample_filters": registers("sample_filter", "no_refusals"),
    "chatlearn_schedules": registers("schedule", "cosine"),
    "chatlearn_step_policies": registers("step_policy", "budget"),
    "chatlearn_rollout_modes": registers("rollout_mode", "overnight"),
    "chatlearn_outputs": registers("output", "margin"),
    "chatlearn_flow_methods": registers("flow_method", "trainer.margin"),
    "chatlearn_aggregations": registers("aggregation", "sqrt_length"),
    "chatlearn_run_start": observes(
        lambda observers, path: observers.run_start({"name": "mine"}, path, GRAPH),
        lambda module, path: (path / "owner.txt").read_text(encoding="utf-8"),
        "mine",
    ),
    "chatlearn_rollout_end": observes(
        lambda observers, path: observers.rollout_end(2, [SAMPLE, SAMPLE], {}, PlainData()),
        lambda module, path: module.seen,
        [(2, 2)],
    ),
    "chatlearn_step_end": observes(
        lambda observers, path: observers.step_end(5, {"reward": 0.25}),
        lambda module, path: module.rewards,
        {5: 0.25},
    ),
    "chatlearn_weights_synced": observes(
        lambda observers, path: observers.weights_synced(4, RECEIPTS),
        lambda module, path: module.serving,
        {4: [0]},
    ),
    "chatlearn_checkpoint_saved": observes(
        lambda observers, path: observers.checkpoint_saved(7, path / "step_7"),
        lambda module, path: module.saved,
        [(7, "step_7")],
    ),
    "chatlearn_error": observes(
        lambda observers, path: observers.error(ValueError("no reward"), FAILURE),
        lambda module, path: module.pages,
        ["step 3: ValueError: no reward"],
    ),
    "chatlearn_run_end": observes(
        lambda observers, path: observers.run_end("completed", {"eval/reward": 0.5}),
        lambda module, path: module.ended,
        [("completed", 0.5)],
    ),
}


def example_of(hook: str) -> str:
    text, marker, example = inspect.cleandoc(getattr(hookspec, hook).__doc__).partition("\nExample:\n")
    assert marker, f"{hook} has no Example"
    assert len(text) > 60, f"{hook} does not say when it is called"
    return textwrap.dedent(example)


def test_every_hook_has_a_check() -> None:
    assert sorted(CHECKS) == sorted(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_documented_example_works(hook: str, tmp_path: Path) -> None:
    module = types.ModuleType("example_plugin")
    exec(compile(example_of(hook), hook, "exec"), vars(module))
    source = PluginSource("example", "example-dist", "1.0", load=lambda: module)
    registry = load_plugins([source], disabled=DisabledDistributions(), strict=True)
    CHECKS[hook](registry, module, tmp_path)


def test_registering_hooks_and_record_kinds_are_the_same_set() -> None:
    assert sorted(REGISTERING_HOOKS.values()) == sorted(RECORD_TYPES)
    assert set(REGISTERING_HOOKS) <= set(HOOKS)


def test_every_observing_hook_has_a_method_with_its_arguments() -> None:
    for hook in set(HOOKS) - set(REGISTERING_HOOKS):
        method = getattr(Observers, hook.removeprefix("chatlearn_"))
        called_with = list(inspect.signature(method).parameters)[1:]
        assert called_with == list(inspect.signature(getattr(hookspec, hook)).parameters)


def test_hookspec_holds_specifications_only() -> None:
    tree = ast.parse(inspect.getsource(hookspec))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions == HOOKS
    assert not [node for node in tree.body if isinstance(node, ast.ClassDef)]
