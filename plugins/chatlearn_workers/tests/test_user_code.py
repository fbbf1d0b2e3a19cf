"""Workers find the user's Python files: in the directory of the driver, or sent by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chatlearn_workers import user_code
from chatlearn_workers.user_code import UserCode, collect_code

ENTER = """
import json, os, sys
from chatlearn_workers.user_code import UserCode, enter_directory
directory, files, problem = json.loads(sys.argv[1])
sys.path.insert(0, directory)
code = UserCode(directory, {name: text.encode() for name, text in files.items()}, problem)
said = enter_directory(directory, code)
import importlib.util
found = importlib.util.find_spec("score")
print(json.dumps([os.getcwd(), said, found and found.origin, sorted(n for _, _, ns in os.walk(".") for n in ns)]))
"""


def enter(directory: Path, code: UserCode) -> tuple[Path, str | None, str | None, list[str]]:
    """What a process sees that enters: it changes its directory and its path, so it is one of its own."""
    argument = json.dumps([str(directory), {n: c.decode() for n, c in code.files.items()}, code.problem])
    done = subprocess.run([sys.executable, "-c", ENTER, argument], check=True, capture_output=True, text=True)
    where, said, origin, names = json.loads(done.stdout)
    return Path(where), said, origin, names


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    for name in ("score.py", "flows/mine.py", ".hidden/no.py", "env/lib/no.py", "__pycache__/no.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    (folder / "env" / "pyvenv.cfg").touch()
    (folder / "weights.bin").write_bytes(bytes(100))
    return folder


def test_python_files_are_collected_and_nothing_else(directory: Path) -> None:
    code = collect_code(directory)
    assert code == UserCode(str(directory), {"score.py": b"# score.py\n", "flows/mine.py": b"# flows/mine.py\n"})


def test_a_worker_enters_the_directory_where_it_is_the_same(directory: Path) -> None:
    where, said, origin, _ = enter(directory, collect_code(directory))
    assert (where, said, origin) == (directory, None, str(directory / "score.py"))


def test_a_worker_without_the_directory_works_in_a_copy_and_leaves_nothing(directory: Path) -> None:
    code = collect_code(directory)
    where, said, origin, names = enter(directory.parent / "elsewhere", code)
    assert said is None
    assert origin == str(where / "score.py")
    assert names == ["mine.py", "score.py"]
    assert not where.exists()


def test_stale_files_of_the_same_name_are_not_used(directory: Path) -> None:
    code = collect_code(directory)
    (directory / "score.py").write_text("# old\n")
    where, _, origin, _ = enter(directory, code)
    assert where != directory
    assert origin == str(where / "score.py")


@pytest.mark.parametrize(
    ("limit", "value", "found"),
    [
        ("MAX_FILES", 1, "more than 1 Python files"),
        ("MAX_BYTES", 12, "MiB of them"),
        ("MAX_DIRECTORIES", 1, "more than 1 directories"),
    ],
)
def test_a_directory_with_too_much_is_no_problem_where_it_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: Any, found: str
) -> None:
    monkeypatch.setattr(user_code, limit, value)
    code = collect_code(directory)
    assert code.files == {}
    assert enter(directory, code)[:2] == (directory, None)
    _, said, _, _ = enter(directory.parent / "elsewhere", code)
    assert said is not None
    assert f"this machine does not have {directory}" in said
    assert found in said
    assert "runtime.options.working_dir" in said
