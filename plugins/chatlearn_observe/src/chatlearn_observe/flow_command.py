"""The command ``chatlearn flow``: shows a configuration's data flow as text, diagram or picture."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class FlowFormat(StrEnum):
    """Output format of a flow."""

    text = "text"
    mermaid = "mermaid"
    svg = "svg"


def flow(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to override, as key=value.", metavar="[KEY=VALUE]...")
    ] = None,
    output_format: Annotated[FlowFormat, typer.Option("--format", help="text, mermaid or svg.")] = FlowFormat.text,
    output: Annotated[Path | None, typer.Option(help="File to write instead of printing.")] = None,
) -> None:
    """Trace the flow of a configuration's algorithm, check it and show it."""
    # Imported here so that --help need not wait for torch.
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import build_algorithm, trace_flow
    from chatlearn_core.flow import to_text
    from chatlearn_core.plugins.loader import discover_plugins
    from chatlearn_observe.flow_pictures import to_mermaid, to_svg

    registry = discover_plugins()
    loaded = load_config(config, overrides or [], registry)
    graph = trace_flow(loaded, build_algorithm(loaded, registry), registry)
    shown = {FlowFormat.text: to_text, FlowFormat.mermaid: to_mermaid, FlowFormat.svg: to_svg}[output_format](graph)
    if output is None:
        typer.echo(shown)
    else:
        output.write_text(shown, encoding="utf-8")
        typer.echo(f"wrote {output}")
