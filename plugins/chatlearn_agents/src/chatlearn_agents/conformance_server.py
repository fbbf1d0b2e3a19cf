"""The server of ``chatlearn plugins check chatlearn-agents`` for the tool ``mcp``; runs never start it."""

from __future__ import annotations

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def halves(divisor: int) -> int:
    """Divide a hundred."""
    if divisor == 0:
        raise ToolError("nothing is left")
    return 100 // divisor


if __name__ == "__main__":
    server.run()
