"""The watch over Ray and the guard beside the driver, with other processes in Ray's place."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_ray import guard, watch
from chatlearn_ray.watch import RayWatch

HERE = "00ff"


class FakeRay:
    """Answers as Ray's head does."""

    def __init__(self) -> None:
        self.answers = True
        self.is_alive = True
        self._private = SimpleNamespace(worker=SimpleNamespace(_global_node=None))

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: HERE)

    def nodes(self) -> list[dict[str, Any]]:
        if not self.answers:
            raise ConnectionError("no head")
        return [{"NodeID": HERE, "Alive": self.is_alive}, {"NodeID": "0000", "Alive": False}]


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(watch, "ray", fake)
    return fake


@pytest.fixture
def said() -> queue.Queue[str]:
    return queue.Queue()


@pytest.fixture
def make(head: FakeRay, said: queue.Queue[str], tmp_path: Path) -> Iterator[Callable[..., RayWatch]]:
    made: list[RayWatch] = []

    def build(**owned: int) -> RayWatch:
        page = tmp_path / "failure.md"
        made.append(RayWatch(owned=owned, silence_s=0.6, sentence="Lost: {reason}!", page=page, on_lost=said.put))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    sleeper = subprocess.Popen(["sleep", "120"])
    yield sleeper
    sleeper.kill()
    sleeper.wait()


def test_the_end_of_a_ray_process_is_reported(
    make: Callable[..., RayWatch], said: queue.Queue[str], process: subprocess.Popen[bytes]
) -> None:
    make(raylet=process.pid)
    process.kill()
    assert said.get(timeout=30) == f"Lost: its raylet (process {process.pid}) has ended!"


def test_a_stopped_process_is_reported_and_a_continued_one_is_not(
    make: Callable[..., RayWatch], said: queue.Queue[str], process: subprocess.Popen[bytes]
) -> None:
    make(gcs_server=process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(queue.Empty):
        said.get(timeout=2)
    os.kill(process.pid, signal.SIGSTOP)
    assert said.get(timeout=30) == f"Lost: its gcs_server (process {process.pid}) has been stopped (SIGSTOP) for 0.6 s!"


def test_a_silent_head_is_reported(make: Callable[..., RayWatch], said: queue.Queue[str], head: FakeRay) -> None:
    make()
    with pytest.raises(queue.Empty):
        said.get(timeout=2)
    head.answers = False
    assert said.get(timeout=30) == "Lost: its head (GCS) has not answered for 0.6 s!"


def test_a_head_that_considers_this_node_dead_is_reported(
    make: Callable[..., RayWatch], said: queue.Queue[str], head: FakeRay
) -> None:
    make()
    head.is_alive = False
    assert "considers this node dead" in said.get(timeout=30)


def test_only_processes_that_were_started_here_are_ended(
    make: Callable[..., RayWatch], process: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen(["sleep", "120"]) as own:
        os.kill(own.pid, signal.SIGSTOP)
        make(raylet=own.pid).end_ray()
        assert own.wait(30) == -signal.SIGKILL
    make().end_ray()
    assert process.poll() is None


DRIVER = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_watch import FakeRay
from chatlearn_ray import watch
watch.ray = FakeRay()
watch.RayWatch(
    owned={"raylet": int(sys.argv[2])}, silence_s=0.6, sentence="Lost: {reason}!", page=Path(sys.argv[3]),
    on_lost=lambda sentence: os._exit(1),
)
forked = os.fork() if "forks" in sys.argv else 0
if forked or "forks" not in sys.argv:
    print("watching", forked, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("first", ["driver", "ray"])
def test_the_guard_outlives_the_driver(first: str, process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """It ends Ray when the driver was killed, and speaks for a driver that Ray took with it."""
    page = tmp_path / "failure.md"
    arguments = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(process.pid), str(page)]
    driver = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "watching 0\n"
    (driver if first == "driver" else process).kill()
    assert process.wait(30) == -signal.SIGKILL
    _, words = driver.communicate(timeout=30)
    if first == "driver":
        assert not page.exists()
        return
    sentence = f"Lost: its raylet (process {process.pid}) has ended!"
    assert sentence in words
    assert sentence in page.read_text()


def test_nothing_is_watched_any_more_once_it_is_closed(
    make: Callable[..., RayWatch], said: queue.Queue[str], process: subprocess.Popen[bytes]
) -> None:
    one = make(raylet=process.pid)
    one.close()
    one.close()
    assert one._guard.returncode == 0
    assert process.poll() is None, "a driver that leaves in order ends its Ray itself"
    assert said.empty()


def test_the_guard_notices_the_end_of_a_driver_whose_pipe_something_that_it_forked_holds_open(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(process.pid), str(tmp_path / "page")]
    driver = subprocess.Popen([*arguments, "forks"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    forked = int(driver.stdout.readline().removeprefix("watching "))
    try:
        driver.kill()
        assert process.wait(30) == -signal.SIGKILL
    finally:
        os.kill(forked, signal.SIGKILL)
        driver.communicate(timeout=30)


def test_a_driver_that_ends_its_ray_itself_has_lost_nothing(
    make: Callable[..., RayWatch], said: queue.Queue[str], process: subprocess.Popen[bytes]
) -> None:
    make(raylet=process.pid).leaving()
    process.kill()
    with pytest.raises(queue.Empty):
        said.get(timeout=1)


def test_a_run_that_is_suspended_as_a_whole_is_left_alone(
    process: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-Z stops the driver and the Ray that it started, but not the guard."""

    def signalled(number: signal.Signals, *processes: subprocess.Popen[bytes]) -> None:
        for one in processes:
            one.send_signal(number)
            os.waitid(os.P_PID, one.pid, os.WSTOPPED if number == signal.SIGSTOP else os.WCONTINUED)

    driver = subprocess.Popen(["sleep", "120"])
    try:
        facts = {"watched": {"its raylet": process.pid}, "owned": [], "raylet": None, "worker_mark": ""}
        facts |= {"driver": driver.pid, "silence_s": 0.6, "sentence": "Lost: {reason}!", "page": str(tmp_path / "page")}
        one = guard.Guard(facts)
        signalled(signal.SIGSTOP, driver, process)
        for _ in range(5):
            one._look()
        assert capsys.readouterr().out == ""

        signalled(signal.SIGCONT, driver)
        for _ in range(3):
            one._look()
        assert "has been stopped" in capsys.readouterr().out

        signalled(signal.SIGSTOP, driver)
        one._deadline = 0.0
        one._look()
        assert driver.poll() is None, "it could not hear"
        signalled(signal.SIGCONT, driver)
        one._deadline = 0.0
        one._look()
        assert driver.wait(30) == -signal.SIGKILL
    finally:
        driver.kill()
        driver.wait()


def test_a_process_that_ends_while_it_is_looked_at_has_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Iterator[Path]:
        raise ProcessLookupError

    monkeypatch.setattr(Path, "glob", gone)
    assert guard.children_of(os.getpid()) == set()
