"""The Python tool: programs of the policy in the sandbox."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chatlearn_agents.options import PythonOptions
from chatlearn_agents.python_tool import PythonTool
from chatlearn_core.exceptions import ConfigError
from chatlearn_sandbox.sandbox import Sandbox, SandboxError, SandboxResult


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    tool = PythonTool(PythonOptions(timeout_s=2, output_kb=4, memory_mb=256))
    try:
        tool.open()
    except ConfigError as error:
        pytest.skip(f"this machine makes no namespaces: {error}")
    yield tool
    tool.close()


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("x = 6\nprint('a')\nx * 7", "a\n42"),
        ("x = 1", "[the program printed nothing; print what is to be seen]"),
        ("def f():\n    return 1 / 0\nf()", 'File "program.py", line 2, in f'),
        ("1 +", "SyntaxError"),
        ("import urllib.request as r\nr.urlopen('http://127.0.0.1:9', timeout=1)", "Error"),
        ("while True: pass", "[the program did not end within 2 s]"),
        ("print('x' * 10_000_000)", "[the program was ended: it wrote more than 4 KiB]"),
        ("import os\nos.kill(os.getpid(), 9)", "[the program was ended by signal 9"),
        ("raise SystemExit(0)", "[the program printed nothing"),
    ],
)
def test_what_the_policy_sees(code: str, shown: str, tool: PythonTool) -> None:
    text = tool.execute(code)
    assert shown in text
    assert "main.py" not in text


def test_a_program_whose_processes_fill_the_memory_is_told_so() -> None:
    tool = PythonTool(PythonOptions(memory_mb=64))
    told = tool._described(SandboxResult("out_of_memory", None, b"a\n", b""))
    assert told == "a\n[the program was ended: its processes had more than 64 MiB together]"


def test_a_machine_without_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Sandbox) -> None:
        raise SandboxError("no namespaces")

    monkeypatch.setattr(Sandbox, "check", refuses)
    with pytest.raises(ConfigError, match="cannot run programs in a sandbox: no namespaces"):
        PythonTool(PythonOptions()).open()
