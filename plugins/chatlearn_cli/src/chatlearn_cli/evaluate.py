"""``chatlearn eval``: models and checkpoints of a run, measured on its eval datasets."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatlearn_cli.run import ConfigFile, Overrides, StrictPlugins, assemble, discover, load, until_interrupted
from chatlearn_cli.terminal import tell
from chatlearn_core.exceptions import ChatLearnError, CheckpointError, ConfigError
from chatlearn_core.printable import printable

if TYPE_CHECKING:
    from chatlearn_cli.evaluation_results import Evaluated
    from chatlearn_core.config.load import LoadedConfig
    from chatlearn_core.executor.assembly import Assembly
    from chatlearn_core.executor.checkpoint import Checkpoint
    from chatlearn_core.plugins.registry import PluginRegistry

UNNAMED = "eval"
"""Name for ``--set`` of the datasets that are in no evaluation set."""


def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model directory to evaluate; the run's trained model by default. May be repeated."),
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="Checkpoints of the run: all, or steps and paths separated by commas.")
    ] = None,
    evaluation_set: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Evaluation set; all by default. May be repeated. 'eval' means the datasets that are in no set.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Directory for metrics.json, metrics.csv and metrics.svg; by default evaluation/ in the run."
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Evaluate models or checkpoints on a configuration's eval datasets, without training."""
    from chatlearn_cli.evaluation import evaluate_checkpoints, evaluate_model
    from chatlearn_cli.evaluation_results import Evaluated, as_json, write_results
    from chatlearn_core.executor.planning import run_directory

    registry = discover(strict_plugins)
    loaded = load(config, overrides, registry)
    if not loaded.config.data.eval:
        raise ConfigError(f"{config}: the configuration has no evaluation dataset; add one to data.eval")
    run_dir = run_directory(loaded.config)
    chosen = None if checkpoints is None else _checkpoints(checkpoints, run_dir)
    models = list(model or [])
    if not models and chosen is None:
        models = [str(run_dir / "model") if (run_dir / "model").is_dir() else loaded.config.model.path]
    found: list[Evaluated] = []

    def told(name: str, step: int | None, path: str, metrics: dict[str, float]) -> None:
        found.append(Evaluated(name, step, path, metrics))
        if len(models) + len(chosen or ()) > 1:
            tell(f"evaluated {name} ({len(found)} of {len(models) + len(chosen or ())})")

    if chosen is not None:
        assembly = _only_sets(assemble(loaded, registry), evaluation_set)

        def checkpoint_told(checkpoint: Checkpoint, metrics: dict[str, float]) -> None:
            told(f"step {checkpoint.step}", checkpoint.step, str(checkpoint.path), metrics)

        until_interrupted(evaluate_checkpoints(assembly, chosen, checkpoint_told))
    for path in models:
        of_model = _with_model(loaded, config, overrides, path, registry)
        assembly = _only_sets(assemble(of_model, registry), evaluation_set)
        told(path, None, path, until_interrupted(evaluate_model(assembly)))
    several = chosen is not None or len(found) > 1
    if several or output is not None:
        directory = output or run_dir / "evaluation"
        files = write_results(directory, found)
        tell(f"wrote {', '.join(file.name for file in files)} to {directory}")
    if json_output:
        typer.echo(json.dumps(as_json(found) if several else {"model": found[0].path, **found[0].metrics}))
    elif several:
        _print_table(found)
    else:
        typer.echo(f"model: {found[0].path}")
        for name, number in found[0].metrics.items():
            typer.echo(f"  {printable(name):<32} {number:.4f}")


def _with_model(
    loaded: LoadedConfig, config: Path, overrides: list[str] | None, path: str, registry: PluginRegistry
) -> LoadedConfig:
    """The configuration with the model to evaluate in place of the trained one, and of the generators' that serve it.

    Trainer roles that do not learn, such as a reference, keep the model that they have in the run.
    """
    from chatlearn_core.executor.assembly import assemble_flow

    flow = assemble_flow(loaded, registry)
    trained = flow.policy or flow.learning.learners[0]
    roles, frozen = loaded.config.roles, loaded.config.model.model_dump(exclude_defaults=True)
    settings: dict[str, Any] = {"model.path": path}
    for name, role in roles.items():
        if role.kind == "trainer" and role.model is None and name not in flow.learning.learners:
            settings[f"roles.{name}.model"] = frozen
    if roles[trained].model is not None:
        settings[f"roles.{trained}.model.path"] = path
    changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load(config, [*(overrides or []), *changes], registry)


def _checkpoints(wanted: str, run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints that ``--checkpoints`` names, by step.

    Raises:
        ConfigError: the option names nothing, or something that is not a checkpoint of this run.
        CheckpointError: there is none, or one is damaged.
    """
    from chatlearn_core.executor.checkpoint import CheckpointStore, read_checkpoint

    store = CheckpointStore(run_dir / "checkpoints", keep_last=1, keep_best=0)
    complete = {checkpoint.step: checkpoint for checkpoint in store.complete()}
    if not complete:
        raise CheckpointError(
            f"{store.directory} has no complete checkpoint. Train the run first (checkpoint.every), check output_dir, "
            "or evaluate a model directory with --model"
        )
    if wanted.strip() == "all":
        steps = sorted(complete)
    else:
        names = [name.strip() for name in wanted.split(",") if name.strip()]
        steps = sorted({_step(name, store.directory, complete.keys()) for name in names})
        if not steps:
            raise ConfigError(
                f"--checkpoints is {wanted!r}, which names no checkpoint; write all, or steps such as 10,20"
            )
    return [read_checkpoint(complete[step].path) for step in steps]


def _step(name: str, directory: Path, there: Collection[int]) -> int:
    """Return the step of a checkpoint given as ``20``, ``step_20`` or a path."""
    steps = sorted(there)
    path = Path(name)
    found = re.fullmatch(r"(?:step_)?(\d+)", path.name)
    if found is None or (path.name != name and path.resolve().parent != directory.resolve()):
        raise ConfigError(
            f"--checkpoints names {name!r}, which is not a checkpoint of this run ({directory}; it has steps "
            f"{', '.join(map(str, steps))}). Evaluate a checkpoint of another run with that run's configuration"
        )
    step = int(found[1])
    if step not in steps:
        raise ConfigError(
            f"--checkpoints names {name!r}, and {directory} has no complete checkpoint of step {step}; it has steps "
            f"{', '.join(map(str, steps))} (checkpoint.keep_last says how many a run keeps)"
        )
    return step


def _only_sets(assembly: Assembly, names: list[str] | None) -> Assembly:
    """Return the assembly with only the evaluation sets of these names.

    Raises:
        ConfigError: there is no such set.
    """
    from chatlearn_core.plugins.sources import did_you_mean

    if not names:
        return assembly
    by_name = {one.name or UNNAMED: one for one in assembly.evaluations}
    for name in names:
        if name not in by_name:
            raise ConfigError(
                f"--set names {name!r}, and {assembly.loaded.source} has the evaluation sets {', '.join(by_name)} "
                f"({UNNAMED}: the datasets in no set).{did_you_mean(name, list(by_name))} Add it under eval.sets, or "
                "correct it"
            )
    return replace(assembly, evaluations=tuple(one for name, one in by_name.items() if name in names))


def _print_table(found: Sequence[Evaluated]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from chatlearn_cli.evaluation_results import measured, metric_names

    table = Table("metric", "model", show_edge=False)
    for title in ("value", "low", "high"):
        table.add_column(title, justify="right")
    for name in metric_names(found):
        rows = [(one, parts) for one in found if (parts := measured(one, name)) is not None]
        for row, (one, parts) in enumerate(rows):
            numbers = ["" if number is None else f"{number:.4f}" for number in parts]
            cells = [printable(name) if row == 0 else "", printable(one.name), *numbers]
            table.add_row(*map(Text, cells), end_section=row == len(rows) - 1)
    if table.row_count == 0:
        raise ChatLearnError("nothing was measured: every evaluation set is empty")
    Console(highlight=False).print(table)
