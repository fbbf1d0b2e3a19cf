"""``chatlearn run``."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from chatlearn_cli.terminal import tell
from chatlearn_core.exceptions import ConfigError, Interrupted
from chatlearn_core.printable import printable

if TYPE_CHECKING:
    from chatlearn_core.config.load import LoadedConfig
    from chatlearn_core.executor.assembly import Assembly
    from chatlearn_core.plugins.registry import PluginRegistry
    from chatlearn_core.runtime.plan import Refresh

# Modules that load a model are imported inside the commands, so that --help does not wait for torch.

T = TypeVar("T")
RECORDED = "recorded"
"""The rollout mode that trains on rollouts from a directory."""

ConfigFile = Annotated[Path, typer.Argument(help="A run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to replace, as key=value.", metavar="[KEY=VALUE]...")
]
StrictPlugins = Annotated[bool, typer.Option("--strict-plugins", help="Any plugin that cannot be used is an error.")]


def run(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            help="auto: continue from the newest checkpoint in the output directory; never: start a new run; or"
            " the path of a checkpoint."
        ),
    ] = "auto",
    rewind: Annotated[
        bool,
        typer.Option(
            "--rewind",
            help="Delete all results that are newer than the checkpoint to continue from."
            " Without this option nothing is deleted.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything and show the flow and the placement of roles, without starting anything.",
        ),
    ] = False,
    live_tokens: Annotated[
        bool,
        typer.Option("--live-tokens", help="Show how many tokens a step has sampled so far; some engines slow down."),
    ] = False,
    rollouts_only: Annotated[
        bool,
        typer.Option("--rollouts-only", help="Write the rollouts of the run's steps to output_dir, and train nothing."),
    ] = False,
    from_rollouts: Annotated[
        Path | None,
        typer.Option(help="Train on the rollouts that --rollouts-only wrote to this output_dir, and sample none."),
    ] = None,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Train a model according to a configuration."""
    from chatlearn_cli.garbage import garbage_collected_seldom
    from chatlearn_cli.progress_bar import ProgressBar
    from chatlearn_core.executor.run import Run

    registry = discover(strict_plugins)
    if from_rollouts is not None:
        if rollouts_only:
            raise ConfigError("--rollouts-only writes rollouts and --from-rollouts reads them. Omit one of them")
        overrides = [*(overrides or []), *_recorded(from_rollouts)]
    assembly = assemble(load(config, overrides, registry), registry)
    if dry_run:
        for warning in assembly.loaded.warnings:
            tell(f"warning: {warning}")
        typer.echo(printable(describe(assembly)))
        return
    listener = ProgressBar(show=assembly.config.log.progress, counts_tokens=live_tokens)
    if rollouts_only:
        if resume != "auto" or rewind:
            raise ConfigError(
                "--rollouts-only goes on after the last step that it wrote: omit --resume and --rewind, or choose "
                "another output_dir to begin anew"
            )
        record = registry.load_factory(registry.select("rollout_mode", RECORDED, "--rollouts-only"), "record")
        with listener, garbage_collected_seldom():
            written = until_interrupted(record(assembly, listener))
        tell(f"train on these rollouts: chatlearn run {shlex.quote(str(config))} --from-rollouts {written}")
        return
    training = Run(assembly, listener=listener, observers=registry.observers)
    mode: Any = resume if resume in ("auto", "never") else Path(resume)
    with listener, garbage_collected_seldom():
        command = shlex.join(["chatlearn", "run", str(config), *(overrides or [])])
        until_interrupted(training.train(mode, rewind=rewind, command=command))


def _recorded(directory: Path) -> list[str]:
    """The settings of ``--from-rollouts``."""
    options = json.dumps({"directory": str(directory.resolve())})
    return [f"rollout.mode={RECORDED}", f"rollout.options={options}", "rollout.max_staleness=null"]


def describe(assembly: Assembly) -> str:
    """Describe a run: flow, roles, placement, offloading, weight transport, data."""
    from chatlearn_cli.sharing_lines import sharing_lines
    from chatlearn_core.executor.component_factory import build_colocation, build_runtime
    from chatlearn_core.executor.device_sharing import schedule
    from chatlearn_core.flow import to_text

    plan = assembly.plan
    lines = [to_text(assembly.graph), "", "roles"]
    for role in plan.roles.values():
        backends = " + ".join(backend.record.name for backend in role.backends)
        learns = ", learns" if role.trainable else ""
        device = "" if not role.holds_a_model else f"device {role.device}, "
        size = f"{role.replicas} replica(s)" + ("" if not role.holds_a_model else f" x {role.ranks} rank(s)")
        layout = "".join(f", {dimension} {ranks}" for dimension, ranks in role.parallel.items())
        lines.append(f"  {role.name:<12} {role.kind:<10} {backends:<20} {device}{size}{layout}{learns}")
    lines += ["", "places"]
    runtime = build_runtime(assembly)
    sharing = build_colocation(assembly, runtime).sharing
    for name, facts in runtime.describe().items():
        lines += [f"  {name:<12} {place}" for place in facts.get("places", ["in this process"])]
    turns = schedule(sharing, plan, assembly.graph, assembly.learning.learners)
    lines += ["", "memory", *(f"  {line}" for line in sharing_lines(sharing, turns))]
    lines += ["", "rollouts", *(f"  {line}" for line in assembly.mode), "", "weight sync"]
    lines += [f"  {s.trainer} -> {s.target} by {s.record.name}: {s.why}; {s.form}" for s in plan.weight_syncs] or [
        "  none"
    ]
    if plan.refreshes:
        lines += ["", "refresh", *(f"  {_refresh_text(name, refresh)}" for name, refresh in plan.refreshes.items())]
    lines += ["", "data", *(f"  {report}" for report in assembly.train_set.reports)]
    lines += [f"  {report} (eval)" for report in assembly.eval_reports]
    return "\n".join(lines)


def _refresh_text(follower: str, refresh: Refresh) -> str:
    """Describe how a trainer role gets the weights of the role that it follows."""
    route = refresh.route
    how = (
        f"by model directories: {refresh.why_directory}"
        if route is None
        else f"by {route.record.name}: {route.why}; {route.form}"
    )
    return f"{refresh.role} -> {follower} every {refresh.every} step(s), decay {refresh.decay:g}, {how}"


def discover(strict: bool) -> PluginRegistry:
    """Find the installed plugins, once for a command."""
    from chatlearn_core.plugins.loader import discover_plugins

    return discover_plugins(strict=strict)


def load(config: Path, overrides: list[str] | None, registry: PluginRegistry) -> LoadedConfig:
    """Read and check a configuration file."""
    from chatlearn_core.config.load import load_config

    return load_config(config, overrides or [], registry)


def assemble(loaded: LoadedConfig, registry: PluginRegistry) -> Assembly:
    """Assemble the run without starting anything."""
    from chatlearn_core.executor.assembly import assemble

    return assemble(loaded, registry)


def until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; the first Ctrl-C or SIGTERM stops cleanly, the second ends the process at once.

    Raises:
        Interrupted: stopped on request.
        PluginError: no signal came, but code called ``sys.exit`` and ended the event loop.
    """
    requested = False

    async def supervised() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(work)

        # Not loop.add_signal_handler: while a plugin blocks the event loop, the loop would see no signal, and only
        # SIGKILL would help. This handler runs even then, and the second signal needs no handler at all.
        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal requested
            requested = True
            for handled in (signal.SIGINT, signal.SIGTERM):
                signal.signal(handled, signal.SIG_DFL)
            with suppress(OSError, ValueError):  # the terminal may be gone
                os.write(sys.stderr.fileno(), b"\nstopping; once more ends the process at once\n")
            loop.call_soon_threadsafe(task.cancel)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        try:
            return await task
        except asyncio.CancelledError:
            if not requested:
                raise
            raise Interrupted("stopped on request") from None

    try:
        return asyncio.run(supervised())
    except SystemExit as error:
        from chatlearn_core.plugins.exits import exit_called

        raise exit_called(error) from error
