"""A reward function that does what its completion says: honest ones get the score that they name."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "CHATLEARN_FUZZ_HOSTILE"


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def sockets() -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                found.append(int(entry.name))
    return found


def write_to(descriptors: list[int], content: bytes) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.write(descriptor, content)


def later(work: Any) -> None:
    threading.Thread(target=lambda: (time.sleep(0.05), work()), daemon=True).start()


def act(action: str) -> Any:
    """Do one thing that a function should not; what it returns ends the function."""
    match action:
        case "fork":
            os.fork()
        case "fork and exit":
            if os.fork() == 0:
                sys.exit(0)
        case "fork and raise":
            if os.fork() == 0:
                raise KeyError
        case "fork in C":
            ctypes.CDLL(None).fork()
        case "fork and stay":
            if os.fork() == 0:
                time.sleep(600)
        case "write":
            write_to(sockets(), b"hello")
        case "write much":
            write_to(sockets(), b"\xff" * 100_000)
        case "write a frame":
            write_to(sockets(), bytes(16) + (14).to_bytes(8, "big") + b'{"value": 7.5}')
        case "write later":
            later(lambda: write_to(sockets(), b"{}"))
        case "print":
            print("\x1b[31m" + "x" * 200_000)
        case "close":
            os.closerange(3, 100)
        case "replace":
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in sockets():
                os.dup2(null, descriptor)
        case "close the output":
            os.close(1)
            os.close(2)
        case "alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        case "daemon":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        case "few files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        case "change the directory":
            os.chdir("/")
        case "spin later":
            later(lambda: [None for _ in iter(int, 1)])
        case "hang":
            time.sleep(600)
        case "stop the keeper":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "kill the keeper":
            os.kill(os.getppid(), signal.SIGKILL)
        case "kill":
            os.killpg(0, signal.SIGKILL)
        case "crash":
            ctypes.string_at(0)
        case "leave":
            os._exit(0)
        case "exit":
            sys.exit("\ud800")
        case "exec":
            os.execv("/bin/true", ["true"])
        case "raise":
            raise ValueError("\x1b[2J half \ud800 of a pair\n" * 100)
        case "rude":
            raise RudeError
        case "recurse":
            return act(action)
        case "large":
            return 1e308
        case "nan":
            return {"score": float("nan"), "x": float("inf")}
        case "names":
            return {"score": 0.5, "\ud800": 1, "\x1b[2J": 2, 3: 4}
        case "text":
            return "1.0"
        case "huge":
            return {"score": 10**5000}
        case "nested":
            nested: list[Any] = []
            for _ in range(100_000):
                nested = [nested]
            return nested
    return None


ACTIONS = (
    "fork", "fork and exit", "fork and raise", "fork in C", "fork and stay", "write", "write much", "write a frame",
    "write later", "print", "close", "replace", "close the output", "alarm", "daemon", "few files",
    "change the directory", "spin later", "hang", "stop the keeper", "kill the keeper", "kill", "crash", "leave",
    "exit", "exec", "raise", "rude", "recurse", "large", "nan", "names", "text", "huge", "nested",
)  # fmt: skip


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    *actions, value = solution_str.split("; ")
    for action in actions:
        ended = act(action)
        if ended is not None:
            return ended
    time.sleep(0.01)
    return float(value)
