"""Tool ``python``: runs programs of the policy in a sandbox without network or files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatlearn_agents.options import PythonOptions
from chatlearn_agents.tool_threads import ToolThreads
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Tool
from chatlearn_sandbox.sandbox import Limits, Sandbox, SandboxError, SandboxResult, run

_RUNNER = Path(__file__).with_name("python_program.py").read_text()
_DESCRIPTION = (
    "Runs a Python program and returns what it prints, and the value of its last line if that is an expression. Each "
    "call is a new program."
)


class PythonTool:
    """The source of the Python tool."""

    def __init__(self, options: PythonOptions) -> None:
        self._options = options
        self._sandbox: Sandbox | None = None

    def open(self) -> Sequence[Tool]:
        """Check that the sandbox can be built; see ``ToolSource``."""
        options = self._options
        limits = Limits(
            wall_s=options.timeout_s,
            memory_bytes=options.memory_mb << 20,
            max_processes=options.max_processes,
            disk_bytes=options.disk_mb << 20,
            output_bytes=options.output_kb << 10,
        )
        try:
            self._sandbox = Sandbox(limits, isolation=options.isolation)
            self._sandbox.check()
        except SandboxError as error:
            raise ConfigError(
                f"tool {options.name!r} (kind python): this machine cannot run programs in a sandbox: {error}. Let "
                "users make namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
                "kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp profile), or, for programs "
                "that are trusted, set isolation: none"
            ) from error
        threads = ToolThreads(options.name)
        schema = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
            "additionalProperties": False,
        }

        async def call(arguments: Mapping[str, Any]) -> str:
            return await threads.run(lambda: self.execute(arguments["code"]))

        return [Tool(options.name, _DESCRIPTION, schema, call)]

    def close(self) -> None:
        """Nothing to release: programs end by their own limits."""

    def execute(self, code: str) -> str:
        """Run a program and return its output, with the reason if it did not end well.

        Raises:
            SandboxError: the sandbox failed; the program is not at fault.
        """
        assert self._sandbox is not None, "opened before it is used"
        command = [self._sandbox.python, "-s", "-S", "main.py"]
        files = {"main.py": _RUNNER, "program.py": code}
        with self._sandbox.start(command, files=files) as process:
            [result] = run(process)
        return self._described(result)

    def _described(self, result: SandboxResult) -> str:
        parts = [result.output.decode("utf-8", "replace").rstrip()]
        if result.ended == "timed_out":
            parts.append(f"[the program did not end within {self._options.timeout_s:g} s]")
        elif result.ended == "out_of_memory":
            parts.append(f"[the program was ended: its processes had more than {self._options.memory_mb} MiB together]")
        elif result.ended == "too_much_output":
            parts.append(f"[the program was ended: it wrote more than {self._options.output_kb} KiB]")
        elif result.code:
            parts.append(result.errors.decode("utf-8", "replace").rstrip())
            if result.code < 0:
                parts.append(f"[the program was ended by signal {-result.code}; it may have used too much memory]")
        text = "\n".join(part for part in parts if part)
        return text or "[the program printed nothing; print what is to be seen]"
