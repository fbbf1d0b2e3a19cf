"""The tool ``acme``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Tool, ToolError

from acme_plugin.options import AcmeOptions

SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "minLength": 1, "description": "The word to find."},
        "skip": {"type": "integer", "minimum": 0, "description": "Lines found to leave out, 0 by default."},
    },
    "required": ["word"],
    "additionalProperties": False,
}


class AcmeTool:
    """Finds the lines of a text file that contain a word.

    Implements ``chatlearn_core.protocols.ToolSource``. Many calls run at once on one event loop, so the search, which
    may take long, is done in threads, and the state of a call is in local variables.
    """

    def __init__(self, options: AcmeOptions) -> None:
        self.options = options
        self._lines: list[str] = []
        self._threads: ThreadPoolExecutor | None = None

    def open(self) -> Sequence[Tool]:
        """Read the file.

        Raises:
            ConfigError: it cannot be read.
        """
        path = self.options.path
        try:
            self._lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problem = f"{path} cannot be read: {error}; correct its option path"
            raise ConfigError(f"tool 'acme': {problem}") from error
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="acme")
        return [Tool(self.options.name, "Finds lines that contain a word.", SCHEMA, self._run)]

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    async def _run(self, arguments: Mapping[str, Any]) -> str:
        assert self._threads is not None, "open was not called"
        word, skip = arguments["word"], arguments.get("skip", 0)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._found, word, skip)

    def _found(self, word: str, skip: int) -> str:
        """The answer to a call.

        Raises:
            ToolError: no line is left; the model sees the message.
        """
        wanted = word.casefold()
        found = [f"{number}: {line}" for number, line in enumerate(self._lines, 1) if wanted in line.casefold()]
        if skip >= len(found):
            raise ToolError(f"{len(found)} lines contain {word!r}, and {skip} are left out")
        return "\n".join(found[skip : skip + self.options.max_lines])
