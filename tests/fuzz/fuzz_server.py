"""Runs the cases of fuzz tests in processes of their own, which may crash, hang or fill the memory: a forking server.

Run as a script with the modules to import beforehand. Reads one JSON object a line: ``target`` (``file.py:function``),
``argument`` (JSON, handed to the function), ``cwd``, ``env``, ``timeout_s`` and ``memory_bytes`` (address space).
Answers with one line: ``end`` ("returned", "raised", "exited", "killed" or "timed out"), ``value`` (what the function
returned, as JSON), ``code`` (exit status; negative for a signal), ``output`` (stdout and stderr together, with the
stacks of all threads where the process crashed or hung) and ``seconds``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

EXIT_RETURNED, EXIT_RAISED = 90, 91
"""Exit codes that nothing else uses: they say that the target came to its end, and how."""
DUMP_BEFORE_S = 0.5
"""A process that is about to be killed for its time writes its stacks so much earlier."""


def function_of(target: str) -> Any:
    """The function that ``file.py:function`` names, of a file beside this one: a script's folder is imported from."""
    file, _, name = target.rpartition(":")
    return getattr(importlib.import_module(Path(file).stem), name)


def run(order: dict[str, Any], answer: str, output: int) -> None:
    """In the child: call the target and leave."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(max(0.1, order["timeout_s"] - DUMP_BEFORE_S), file=2)
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"], order["memory_bytes"]))
    code = EXIT_RETURNED
    try:
        value = function_of(order["target"])(order["argument"])
        Path(answer).write_text(json.dumps(value), encoding="utf-8")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = EXIT_RAISED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the interpreter's shutdown is no part of what is tested, and slow


def wait(pid: int, timeout_s: float) -> int | None:
    """The exit status, or None if it takes longer."""
    descriptor = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ready else None


def outcome(order: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait, and say how it ended; everything that the child started ends with it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        answer = Path(folder) / "answer.json"
        pid = os.fork()
        if pid == 0:
            run(order, str(answer), output.fileno())
        code = wait(pid, order["timeout_s"])
        end = {EXIT_RETURNED: "returned", EXIT_RAISED: "raised"}.get(code, "killed" if (code or 0) < 0 else "exited")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if code is None:
            end, code = "timed out", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        value = json.loads(answer.read_text(encoding="utf-8")) if end == "returned" else None
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"end": end, "value": value, "code": code, "output": text, "seconds": time.monotonic() - began}


def serve(preloaded: list[str]) -> None:
    """Modules beside this file can be preloaded, too."""
    for name in preloaded:
        importlib.import_module(name)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
