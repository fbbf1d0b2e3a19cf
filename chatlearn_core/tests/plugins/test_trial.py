"""What a plugin does while it is imported harms no other, is named, and is remembered."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.trial import LIMIT_VARIABLE, LOST_S, TRIED_VARIABLE
from chatlearn_trial import remembered as remembered_outcomes

GOOD = """
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RewardSpec

@hookimpl
def chatlearn_rewards():
    return [RewardSpec(name="good", factory="good_module:Good", options="good_module:Options")]
"""
LEAVES = "import os\nos._exit(3)\n"
CRASHES = "import ctypes\nctypes.string_at(0)\n"
HANGS = "import time\nwhile True:\n    time.sleep(1)\n"
HOOK_HANGS = GOOD.replace("    return", "    import time\n    time.sleep(1e6)\n    return")


@pytest.fixture(autouse=True)
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A memory and variables of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(TRIED_VARIABLE, "")
    monkeypatch.setenv(LIMIT_VARIABLE, "20")
    return tmp_path / "cache" / "chatlearn" / "plugin-records.json"


@pytest.fixture
def only_these(monkeypatch: pytest.MonkeyPatch, fake_environment: Any) -> None:
    """What is installed besides would be tried, too, since nothing is remembered."""
    everything = metadata.distributions
    site = str(fake_environment.site)
    monkeypatch.setattr(
        "chatlearn_core.plugins.sources.metadata.distributions",
        lambda: (one for one in everything() if str(one.locate_file("")) == site),
    )


@pytest.fixture
def num_children(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many child processes were started."""
    started: list[int] = []
    original = remembered_outcomes.try_apart

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(remembered_outcomes, "try_apart", counted)
    return lambda: len(started)


def statuses() -> dict[str, tuple[str, str]]:
    return {entry.distribution: (entry.status, entry.reason) for entry in discover_plugins().entries}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LEAVES, "its import ended the process with exit code 3"),
        (CRASHES, "its import ended the process by signal 11 (SIGSEGV)"),
    ],
    ids=["leaves", "crashes"],
)
def test_one_that_ends_the_process_is_named_and_the_others_work(
    fake_environment: Any, only_these: None, num_children: Callable[[], int], source: str, reason: str
) -> None:
    fake_environment.install("a-dist", GOOD)
    fake_environment.install("bad-dist", source)
    fake_environment.install("z-dist", GOOD.replace('"good"', '"other"'))
    found = statuses()
    assert found["bad-dist"][0] == "failed"
    assert found["bad-dist"][1].startswith(reason)
    assert (found["a-dist"], found["z-dist"]) == (("ok", ""), ("ok", ""))
    assert num_children() == 1
    statuses()
    assert num_children() == 1, "that it was lost is remembered, too"
    later = time.time() + LOST_S + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatlearn_trial.memory.time.time", lambda: later)
        patch.setenv(TRIED_VARIABLE, "")
        assert statuses()["bad-dist"][0] == "failed"
    assert num_children() == 2, "after a while it is tried again"


@pytest.mark.parametrize("source", [HANGS, HOOK_HANGS], ids=["import", "hook"])
def test_one_that_hangs_is_named_with_the_place(
    fake_environment: Any, only_these: None, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.5")
    fake_environment.install("bad-dist", source)
    [(status, reason)] = statuses().values()
    assert status == "failed"
    assert "did not end within 0.5 s; it hangs in" in reason
    assert "CHATLEARN_PLUGIN_TIMEOUT_S sets the limit" in reason
    assert str(fake_environment.site) in reason


def test_what_came_through_is_not_tried_again_until_it_changes(
    fake_environment: Any,
    only_these: None,
    num_children: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    remembered: Path,
) -> None:
    fake_environment.install("a-dist", GOOD)
    fake_environment.install("broken-dist", "raise ValueError('no luck')")
    assert statuses()["broken-dist"] == ("failed", "ValueError: no luck")
    assert num_children() == 1
    statuses()
    monkeypatch.setenv(TRIED_VARIABLE, "")
    statuses()
    assert num_children() == 1, "an exception does no harm here, so it need not be tried again either"
    remembered.unlink()
    statuses()
    assert num_children() == 2
    changed = next(fake_environment.site.glob("a_dist*.py"))
    changed.write_text(changed.read_text() + "# changed\n")
    statuses()
    assert num_children() == 3


def test_processes_that_this_one_starts_need_not_try_again(
    fake_environment: Any, only_these: None, num_children: Callable[[], int], remembered: Path
) -> None:
    fake_environment.install("a-dist", GOOD)
    statuses()
    remembered.unlink()
    assert os.environ[TRIED_VARIABLE]
    statuses()
    assert num_children() == 1


def test_a_memory_that_is_damaged_or_cannot_be_written_does_no_harm(
    fake_environment: Any, only_these: None, monkeypatch: pytest.MonkeyPatch, remembered: Path
) -> None:
    fake_environment.install("a-dist", GOOD)
    remembered.parent.mkdir(parents=True)
    for content in ("{", "[[", "5", "[1, null]", "[" * 100_000):
        remembered.write_text(content)
        monkeypatch.setenv(TRIED_VARIABLE, "")
        assert statuses()["a-dist"][0] == "ok"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setenv(TRIED_VARIABLE, "")
    assert statuses()["a-dist"][0] == "ok"


def test_nothing_is_tried_where_it_is_switched_off(
    fake_environment: Any, only_these: None, num_children: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    fake_environment.install("a-dist", GOOD)
    assert statuses()["a-dist"][0] == "ok"
    assert num_children() == 0


def test_what_is_disabled_is_not_imported_in_the_child_either(
    fake_environment: Any, only_these: None, num_children: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATLEARN_DISABLE_PLUGINS", "bad-dist")
    fake_environment.install("bad-dist", LEAVES)
    assert statuses()["bad-dist"][0] == "disabled"
    assert num_children() == 0


def test_files_in_the_current_directory_are_not_taken_for_modules(
    fake_environment: Any, only_these: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_environment.install("bad-dist", LEAVES)
    monkeypatch.chdir(tmp_path)
    Path("random.py").write_text("raise SystemExit('not the one of the standard library')")
    [(status, _)] = statuses().values()
    assert status == "failed"


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        ("import json\njson.dumps = str", "failed", "its import replaces json.dumps, which all code"),
        ("import builtins\nbuiltins.show = print", "failed", "its import replaces builtins.show, which"),
        ("import threading\nthreading.Thread.start = len", "failed", "its import replaces threading.Thread.start, "),
        ("import sys\nsys.excepthook = print", "failed", "its import replaces sys.excepthook, which"),
        ("import os\nos.chdir('/')", "ok", "its import changes the working directory"),
        ("import os\nos.environ['ACME'] = '1'", "ok", "its import changes the environment (ACME)"),
        ("import random\nrandom.seed(0)", "ok", "its import changes the state of the random generator"),
        ("import sys\nsys.meta_path.append(object())", "ok", "its import changes sys.meta_path"),
        ("import signal\nsignal.signal(signal.SIGUSR1, print)", "ok", "its import changes the handlers of signals"),
    ],
)
def test_changed_global_state_is_noticed(
    fake_environment: Any, only_these: None, source: str, status: str, reason: str
) -> None:
    fake_environment.install("a-dist", f"{source}\n{GOOD}")
    registry = discover_plugins()
    [entry] = registry.entries
    assert entry.status == status
    told = entry.reason if status == "failed" else "".join(registry.warnings).removeprefix("a-dist 1.0: ")
    assert told.startswith(reason)
    assert "a_dist_plugin" not in sys.modules


OBSERVES = (
    GOOD
    + """
calls = []

@hookimpl
def chatlearn_step_end(step):
    calls.append(step)
"""
)


def test_a_plugin_is_imported_when_its_observer_is_called(fake_environment: Any, only_these: None) -> None:
    fake_environment.install("a-dist", OBSERVES)
    for _ in range(2):  # new, then remembered
        registry = discover_plugins()
        assert "a_dist_plugin" not in sys.modules
        [record] = registry.records("reward")
        assert (record.name, record.factory) == ("good", "good_module:Good")
        assert [(one.hook, one.origin) for one in registry.observers.observers] == [
            ("chatlearn_step_end", "a-dist 1.0")
        ]
    pickle.loads(pickle.dumps(registry)).observers.step_end(7, {})  # as workers get it
    assert sys.modules["a_dist_plugin"].calls == [7]
    assert not registry.observers.failures


def test_a_change_of_what_a_plugin_imports_is_noticed(
    fake_environment: Any, only_these: None, num_children: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_environment.install(
        "a-dist", GOOD.replace('"good"', "acme_names.NAME").replace("\n", "\nimport acme_names\n", 1)
    )
    names = fake_environment.site / "acme_names.py"
    names.write_text("NAME = 'first'")
    assert [record.name for record in discover_plugins().records("reward")] == ["first"]
    names.write_text("NAME = 'second'")
    monkeypatch.setenv(TRIED_VARIABLE, "")
    assert [record.name for record in discover_plugins().records("reward")] == ["second"]
    assert num_children() == 2


def test_remembered_records_run_no_code(fake_environment: Any, only_these: None, remembered: Path) -> None:
    """The file is data: a class that is no record makes it useless, and the plugin is imported."""
    fake_environment.install("a-dist", GOOD)
    statuses()
    content = json.loads(remembered.read_text())
    for entry in content.values():
        entry["result"] = pickle.dumps(subprocess.Popen).hex()
    remembered.write_text(json.dumps(content))
    assert statuses()["a-dist"] == ("ok", "")
    assert "a_dist_plugin" in sys.modules


def test_records_of_a_plugins_own_class_come_from_its_import(fake_environment: Any, only_these: None) -> None:
    own = GOOD.replace("@hookimpl", "class OwnSpec(RewardSpec):\n    pass\n\n@hookimpl").replace(
        "[RewardSpec", "[OwnSpec"
    )
    fake_environment.install("a-dist", own)
    [record] = discover_plugins().records("reward")
    assert type(record).__name__ == "OwnSpec"
