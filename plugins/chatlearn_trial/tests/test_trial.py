"""Each task ends in a process of its own; what it did is told in the outcome."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from chatlearn_trial import Memory, Outcome, Task, files_of, try_apart

TASKS = """
import os, sys, time

def run(what, place):
    if what == "raises":
        raise ValueError("no luck")
    if what == "ends":
        os._exit(4)
    if what == "hangs":
        time.sleep(60)
    if what == "late":
        time.sleep(0.6)
    if what == "prints":
        print("lost", file=sys.stderr, flush=True)
        os.write(1, b"lost")
    if what == "lists":
        import listed
        return " ".join(sorted(name for name in sys.modules if name.startswith(("seen", "listed"))))
    if what == "marks":
        sys.modules["seen_by_others"] = sys
    return what
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a function to run."""
    monkeypatch.syspath_prepend(str(tmp_path))
    tmp_path.joinpath("trial_tasks.py").write_text(TASKS)
    tmp_path.joinpath("listed.py").write_text("")
    return tmp_path


def test_every_task_has_an_outcome_of_its_own(tasks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("marks", "raises", "ends", "hangs", "late", "prints", "lists")
    found = try_apart(
        "trial_tasks:run",
        {name: Task(f"doing {name}", (name, "")) for name in names},
        limit_s=1.5,
        notice_s=0.5,
        at_once=1,
    )
    assert {name: one.result for name, one in found.items()} == {
        "marks": "marks", "raises": "", "ends": "", "hangs": "", "late": "late", "prints": "prints", "lists": "listed"
    }  # fmt: skip
    lost = {name: one.lost for name, one in found.items() if one.lost}
    assert lost.pop("ends") == "ended the process with exit code 4"
    assert "trial_tasks.py" in lost["hangs"]
    assert lost.pop("hangs").startswith("did not end within 1.5 s; it hangs in")
    assert lost == {}
    assert set(found["lists"].files) == {str(tasks / "listed.py")}
    printed, told = capfd.readouterr()
    assert printed == ""
    assert {"doing hangs ...", "doing late ..."} <= set(told.splitlines())
    assert "lost" not in told


def test_a_function_that_cannot_be_imported_says_nothing_about_tasks() -> None:
    assert try_apart("no_such_module:run", {"a": Task("a", ())}, limit_s=1.0) == {}


def test_outcomes_are_remembered_as_long_as_they_hold(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("1")
    status = file.stat()
    memory = Memory(tmp_path / "folder" / "memory.json")
    lasting = Outcome("text", patched=("json.dumps",), files={str(file): (status.st_mtime_ns, status.st_size)})
    over = Outcome(lost="did not end", until=time.time() - 1)
    memory.keep({"a": lasting})
    memory.keep({"b": over, "c": Outcome(lost="did not end", until=time.time() + 600)})
    assert memory.recall().keys() == {"a", "c"}
    assert memory.recall()["a"] == lasting
    os.utime(file, ns=(0, 0))
    assert memory.recall().keys() == {"c"}


def test_the_files_of_a_package_are_found_without_importing_it(tasks: Path) -> None:
    package = tasks / "acme_package"
    (package / "data").mkdir(parents=True)
    states = [files_of("acme_package")]
    for file in ("__init__.py", "data/names.json", "data/more.json"):
        package.joinpath(file).write_text("x")
        states.append(files_of("acme_package"))
    assert len({tuple(state) for state in states}) == len(states)
    (package / "__pycache__").mkdir()
    package.joinpath("__pycache__/names.pyc").write_text("x")
    assert files_of("acme_package") == states[-1]
    assert files_of("acme_missing") == ["missing"]
