"""A plugin that hangs or ends the process is named, and the others work; what came through is not tried again."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.plugins import trial
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.trial import LIMIT_VARIABLE, TRIED_VARIABLE

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
    return tmp_path / "cache" / "chatlearn" / "plugins.json"


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
    original = trial._one_child

    def counted(*arguments: Any) -> Any:
        started.append(1)
        return original(*arguments)

    monkeypatch.setattr(trial, "_one_child", counted)
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
    assert num_children() in (1, 2), "another child goes on, if any came after it"


@pytest.mark.parametrize("source", [HANGS, HOOK_HANGS], ids=["import", "hook"])
def test_one_that_hangs_is_named_with_the_place(
    fake_environment: Any, only_these: None, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.5")
    monkeypatch.setattr(trial, "_STACK_S", 1.0)
    fake_environment.install("bad-dist", source)
    [(status, reason)] = statuses().values()
    assert status == "failed"
    assert "did not end within 0.5 s (CHATLEARN_PLUGIN_TIMEOUT_S); it hangs in" in reason
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
    assert num_children() == 1, "an exception does no harm, so it need not be tried again either"
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
