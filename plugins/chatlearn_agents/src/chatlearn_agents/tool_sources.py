"""Makes the sources of tools from their options; a source is imported only if it is used."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_agents.options import (
    CalculatorOptions,
    FunctionToolOptions,
    McpOptions,
    PythonOptions,
    SearchOptions,
    ToolOptions,
)
from chatlearn_agents.tool import ToolSource


def tool_sources(options: Sequence[ToolOptions], role: str) -> list[tuple[str, ToolSource]]:
    """The sources, each with the configuration key that names it.

    Args:
        role: name of the environment's role.
    """
    return [(f"roles.{role}.options.tools.{index}", _source(one)) for index, one in enumerate(options)]


def _source(options: ToolOptions) -> ToolSource:
    match options:
        case FunctionToolOptions():
            from chatlearn_agents.function_tool import FunctionTools

            return FunctionTools(options)
        case CalculatorOptions():
            from chatlearn_agents.calculator import Calculator

            return Calculator(options)
        case PythonOptions():
            from chatlearn_agents.python_tool import PythonTool

            return PythonTool(options)
        case SearchOptions():
            from chatlearn_agents.corpus_search import CorpusSearch

            return CorpusSearch(options)
        case McpOptions():
            from chatlearn_agents.mcp_server import McpServer

            return McpServer(options)
