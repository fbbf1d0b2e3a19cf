"""Registers the environments and the tools of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import EnvironmentSpec, ToolSpec

MCP = ("mcp>=2,<3",)


@hookimpl
def chatlearn_environments() -> Iterable[EnvironmentSpec]:
    """``tools``, ``correction`` and ``game``."""
    return [
        EnvironmentSpec(
            name="tools",
            summary="Runs the tool calls that the policy writes, and shows it their results, over several turns.",
            factory="chatlearn_agents.tool_environment:ToolEnvironment",
            options="chatlearn_agents.options:ToolsOptions",
        ),
        EnvironmentSpec(
            name="correction",
            summary="Tells the policy that its answer is wrong, lets it try again, and rewards a right one.",
            factory="chatlearn_agents.correction_environment:CorrectionEnvironment",
            options="chatlearn_agents.options:CorrectionOptions",
        ),
        EnvironmentSpec(
            name="game",
            summary="Plays a game with the interface of Gymnasium or OpenEnv: observations and actions are texts.",
            factory="chatlearn_agents.game_environment:GameEnvironment",
            options="chatlearn_agents.options:GameOptions",
        ),
    ]


@hookimpl
def chatlearn_tools() -> Iterable[ToolSpec]:
    """``function``, ``calculator``, ``python``, ``search`` and ``mcp``."""
    return [
        ToolSpec(
            name="function",
            summary="A Python function; signature and docstring make its schema.",
            factory="chatlearn_agents.function_tool:FunctionTools",
            options="chatlearn_agents.options:FunctionToolOptions",
        ),
        ToolSpec(
            name="calculator",
            summary="Arithmetic of numbers, operators and functions such as sqrt.",
            factory="chatlearn_agents.calculator:Calculator",
            options="chatlearn_agents.options:CalculatorOptions",
        ),
        ToolSpec(
            name="python",
            summary="Python programs in a sandbox without network or files.",
            factory="chatlearn_agents.python_tool:PythonTool",
            options="chatlearn_agents.options:PythonOptions",
        ),
        ToolSpec(
            name="search",
            summary="Passages of a local file, ranked by BM25.",
            factory="chatlearn_agents.corpus_search:CorpusSearch",
            options="chatlearn_agents.options:SearchOptions",
        ),
        ToolSpec(
            name="mcp",
            summary="The tools of a server that speaks the Model Context Protocol on its standard streams.",
            factory="chatlearn_agents.mcp_server:McpServer",
            options="chatlearn_agents.options:McpOptions",
            requires=(MCP,),
        ),
    ]
