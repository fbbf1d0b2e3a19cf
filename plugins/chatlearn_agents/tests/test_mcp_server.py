"""Tools of a real MCP server, a process on standard streams."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatlearn_agents.mcp_server import McpServer
from chatlearn_agents.options import McpOptions
from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import ToolError

pytest.importorskip("mcp")

SERVER = """
import asyncio, os
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
async def fails() -> str:
    raise LookupError("no such thing")

@server.tool()
async def hangs() -> str:
    await asyncio.sleep(60)
    return "late"

@server.tool()
def pid() -> str:
    return str(os.getpid())

@server.tool()
def dies() -> str:
    os._exit(3)

server.run()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return str(file)


@pytest.fixture(scope="module")
def served(program: str) -> Iterator[dict[str, Any]]:
    server = McpServer(McpOptions(command=(sys.executable, program), prefix="my_", start_timeout_s=120))
    tools = {tool.name: tool for tool in server.open()}
    pid = int(asyncio.run(tools["my_pid"].run({})))
    yield tools
    server.close()
    server.close()
    assert not Path(f"/proc/{pid}").exists(), "the server ends with the client"
    with pytest.raises(ToolError, match="the server of this tool has ended"):
        asyncio.run(tools["my_add"].run({"a": 1, "b": 2}))


@pytest.mark.slow
async def test_calls(served: dict[str, Any]) -> None:
    assert set(served) == {"my_add", "my_fails", "my_hangs", "my_pid", "my_dies"}
    assert served["my_add"].description == "Add two numbers."
    assert served["my_add"].parameters["required"] == ["a", "b"]
    results = await asyncio.gather(*(served["my_add"].run({"a": number, "b": 1}) for number in range(3)))
    assert results == ["1", "2", "3"]
    with pytest.raises(ToolError, match="fails"):
        await served["my_fails"].run({})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await served["my_hangs"].run({})
    assert await served["my_add"].run({"a": 1, "b": 1}) == "2", "a call that timed out does not block the next"
    assert int(await served["my_pid"].run({})) != os.getpid()


@pytest.mark.slow
def test_servers_that_do_not_serve(program: str) -> None:
    with pytest.raises(BackendError, match="MCP server '/no/such/program' does not start: FileNotFoundError"):
        McpServer(McpOptions(command=("/no/such/program",))).open()
    silent = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    with pytest.raises(BackendError, match=r"did not list its tools within 0.3 s \(start_timeout_s\)"):
        McpServer(McpOptions(command=silent, start_timeout_s=0.3)).open()
    with pytest.raises(ConfigError, match="has no tool 'subtract'; it has add, fails, hangs, pid, dies"):
        McpServer(McpOptions(command=(sys.executable, program), tools=("subtract",), start_timeout_s=120)).open()


@pytest.mark.slow
async def test_a_server_that_ended_is_started_again(program: str) -> None:
    server = McpServer(McpOptions(command=(sys.executable, program), start_timeout_s=120, max_restarts=2))
    tools = {tool.name: tool for tool in server.open()}
    try:
        pids = {await tools["pid"].run({})}
        with pytest.raises(BackendError, match="the server of this tool ended before it answered"):
            await tools["dies"].run({})
        pids |= set(await asyncio.gather(tools["pid"].run({}), tools["pid"].run({})))
        assert (len(pids), server.num_restarts) == (2, 1), "calls that wait for one restart share it"
        os.kill(int(await tools["pid"].run({})), signal.SIGKILL)
        with pytest.raises(BackendError, match="ended before it answered"):
            await tools["add"].run({"a": 1, "b": 1})
        assert await tools["add"].run({"a": 1, "b": 1}) == "2"
        with pytest.raises(BackendError, match="ended before it answered"):
            await tools["dies"].run({})
        with pytest.raises(ToolError, match=r"has ended, and was started again 2 times \(max_restarts\)"):
            await tools["add"].run({"a": 1, "b": 1})
    finally:
        server.close()
