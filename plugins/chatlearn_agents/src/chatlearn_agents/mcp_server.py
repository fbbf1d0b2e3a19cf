"""Tools of a server that speaks the Model Context Protocol (https://modelcontextprotocol.io) on standard streams."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from chatlearn_agents.options import McpOptions
from chatlearn_agents.tool import Tool, ToolError
from chatlearn_core.exceptions import BackendError, ConfigError

_STOP_S = 10.0
"""Time limit for the server to end, seconds; after it the thread is abandoned, and the client kills the process."""


class McpServer:
    """The source of one server's tools. The client has an event loop and a thread of its own; the server is a process
    that ends with it.
    """

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._client: Any = None

    def open(self) -> Sequence[Tool]:
        """Start the server and list its tools; see ``ToolSource``."""
        options = self._options
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError("a tool of kind mcp needs the package mcp: pip install 'chatlearn-agents[mcp]'")
        listed: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(listed,), name="mcp client", daemon=True)
        self._thread.start()
        try:
            found = listed.result(options.start_timeout_s)
        except TimeoutError as error:
            self.close()
            raise BackendError(
                f"MCP server {options.command[0]!r} did not list its tools within {options.start_timeout_s:g} s "
                "(start_timeout_s)"
            ) from error
        except Exception as error:
            self.close()
            raise BackendError(f"MCP server {options.command[0]!r} does not start: {_innermost(error)}") from error
        names = [tool.name for tool in found]
        if missing := sorted(set(options.tools or ()) - set(names)):
            self.close()
            raise ConfigError(
                f"MCP server {options.command[0]!r} has no tool {missing[0]!r}; it has {', '.join(names) or 'none'}"
            )
        wanted = names if options.tools is None else options.tools
        return [
            Tool(
                options.prefix + tool.name,
                tool.description or "",
                dict(tool.input_schema),
                partial(self._call, tool.name),
            )
            for tool in found
            if tool.name in wanted
        ]

    def close(self) -> None:
        """End the server; see ``ToolSource``."""
        if self._thread is None:
            return
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_STOP_S)
        self._thread = None

    def _serve(self, listed: concurrent.futures.Future[list[Any]]) -> None:
        try:
            asyncio.run(self._connected(listed))
        except BaseException as error:  # reported by ``open``, or after it by the calls, which find no client
            if not listed.done():
                listed.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
        finally:
            self._client = None

    async def _connected(self, listed: concurrent.futures.Future[list[Any]]) -> None:
        from mcp import Client, StdioServerParameters

        options = self._options
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        program, *arguments = options.command
        parameters = StdioServerParameters(command=program, args=arguments, env=options.env or None)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._client_task(Client(parameters), listed))
            await self._stop.wait()
            serving.cancel()

    async def _client_task(self, connecting: Any, listed: concurrent.futures.Future[list[Any]]) -> None:
        async with connecting as client:
            tools: list[Any] = []
            cursor: str | None = None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            self._client = client
            if not listed.done():
                listed.set_result(tools)
            await asyncio.Event().wait()

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        client, loop = self._client, self._loop
        if client is None or loop is None:
            raise ToolError("the server of this tool has ended")
        asked = asyncio.run_coroutine_threadsafe(client.call_tool(name, dict(arguments)), loop)
        result = await asyncio.wrap_future(asked)
        text = "\n".join(_text_of(part) for part in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or "the server answered with an error")
        return text


def _text_of(part: Any) -> str:
    text = getattr(part, "text", None)
    return text if isinstance(text, str) else f"[{part.type}: not shown]"


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
