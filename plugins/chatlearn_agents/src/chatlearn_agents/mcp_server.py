"""Tools of a server that speaks the Model Context Protocol (https://modelcontextprotocol.io) on standard streams."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from chatlearn_agents.options import McpOptions
from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import Tool, ToolError

_LOG = logging.getLogger(__name__)
_STOP_S = 10.0
"""Time limit for the server to end, seconds; after it the thread is abandoned, and the client kills the process."""


class McpServer:
    """The source of one server's tools. A server that has ended is started again for the next call."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._connection: _Connection | None = None
        self._restarting = threading.Lock()
        self._closed = False
        self.num_restarts = 0

    def open(self) -> Sequence[Tool]:
        """Start the server and list its tools; see ``ToolSource``."""
        options = self._options
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError("a tool of kind mcp needs the package mcp: pip install 'chatlearn-agents[mcp]'")
        self._connection = _Connection(options)
        found = self._connection.open()
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
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool. One whose server ends meanwhile is not repeated here: it may have had effects."""
        connection = self._connection
        if connection is None or connection.client is None:
            connection = await asyncio.to_thread(self._restarted)
        result = await connection.call(name, arguments)
        text = "\n".join(_text_of(part) for part in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or "the server answered with an error")
        return text

    def _restarted(self) -> _Connection:
        """A connection to a new process of a server that has ended. Of several calls the first one starts it.

        Raises:
            ToolError: it has been closed, or was started again ``max_restarts`` times.
            BackendError: it does not start.
        """
        with self._restarting:
            connection, options = self._connection, self._options
            if connection is not None and connection.client is not None:
                return connection
            if self._closed or self.num_restarts >= options.max_restarts:
                again = "" if self._closed else f", and was started again {self.num_restarts} times (max_restarts)"
                raise ToolError(f"the server of this tool has ended{again}")
            self.num_restarts += 1
            _LOG.warning(
                "MCP server %r has ended; starting it again (%d of at most %d times)",
                options.command[0], self.num_restarts, options.max_restarts,
            )  # fmt: skip
            if connection is not None:
                connection.close()
            self._connection = connection = _Connection(options)
            connection.open()
            return connection


class _Connection:
    """One process of the server and its client, which has an event loop and a thread of its own."""

    def __init__(self, options: McpOptions) -> None:
        self.client: Any = None
        """None before it has started and after the server has ended."""
        self._options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None

    def open(self) -> list[Any]:
        """Start the server; return the tools that it lists.

        Raises:
            BackendError: it does not start, or not in time.
        """
        options = self._options
        listed: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(listed,), name="mcp client", daemon=True)
        self._thread.start()
        try:
            return listed.result(options.start_timeout_s)
        except TimeoutError as error:
            self.close()
            raise BackendError(
                f"MCP server {options.command[0]!r} did not list its tools within {options.start_timeout_s:g} s "
                "(start_timeout_s)"
            ) from error
        except Exception as error:
            self.close()
            raise BackendError(f"MCP server {options.command[0]!r} does not start: {_innermost(error)}") from error

    def close(self) -> None:
        """End the server. Safe to call twice."""
        if self._thread is None:
            return
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_STOP_S)
        self._thread = None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of a tool.

        Raises:
            BackendError: the server ended before it answered.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client, loop = self.client, self._loop
        try:
            if client is None or loop is None:
                raise _ended(None)
            asked = asyncio.run_coroutine_threadsafe(client.call_tool(name, dict(arguments)), loop)
            return await asyncio.wrap_future(asked)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            self.client = None
            raise _ended(error) from error

    def _serve(self, listed: concurrent.futures.Future[list[Any]]) -> None:
        try:
            asyncio.run(self._connected(listed))
        except BaseException as error:  # reported by ``open``, or after it by the calls, which find no client
            if not listed.done():
                listed.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
        finally:
            self.client = None

    async def _connected(self, listed: concurrent.futures.Future[list[Any]]) -> None:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        options = self._options
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        program, *arguments = options.command
        parameters = StdioServerParameters(command=program, args=arguments, env=options.env or None)
        # The process's own standard error: what took the place of `sys.stderr` may be no file.
        transport = stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._client_task(Client(transport), listed))
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
            self.client = client
            if not listed.done():
                listed.set_result(tools)
            await asyncio.Event().wait()


def _ended(cause: Exception | None) -> BackendError:
    return BackendError(f"the server of this tool ended before it answered{f': {cause}' if cause else ''}")


def _text_of(part: Any) -> str:
    text = getattr(part, "text", None)
    return text if isinstance(text, str) else f"[{part.type}: not shown]"


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
