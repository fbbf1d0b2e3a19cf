"""Watches the run's Ray: its processes on this machine, and whether its head still answers."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from chatlearn_ray import guard

logger = logging.getLogger(__name__)

_LOOKS = 6
"""Checks in the time after which a silent head counts as lost. Counting checks instead of seconds avoids blaming Ray
while this process is suspended."""
_END_S = guard.WORKERS_S + guard.DEATH_S + 5.0


class RayWatch:
    """Watches the Ray of this process, with a guard process that outlives it (``guard``).

    Args:
        owned: processes of a Ray that was started here, by name; they end with this process. Empty for a joined
            cluster.
        silence_s: seconds for which a process may be stopped, or the head may not answer.
        sentence: message about a lost Ray, with a placeholder ``{reason}``.
        page: file for the guard's message if this process cannot write one.
        on_lost: called with the message, on another thread; answer with ``heard``.
    """

    def __init__(
        self,
        *,
        owned: Mapping[str, int],
        silence_s: float,
        sentence: str,
        page: Path,
        on_lost: Callable[[str], None],
    ) -> None:
        self._silence_s = silence_s
        self._sentence = sentence
        self._on_lost = on_lost
        self._node = ray.get_runtime_context().get_node_id()
        self._closed = threading.Event()
        self._ended = threading.Event()
        self._num_answers = 0
        """Number of the head's answers."""
        self._is_considered_dead = False
        raylet = raylet_here()
        watched = {f"its {name}": pid for name, pid in owned.items() if name in ("raylet", "gcs_server")}
        if raylet is not None:
            watched["its raylet"] = raylet
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        facts = {
            "watched": watched,
            "owned": list(owned.values()),
            "raylet": raylet,
            "worker_mark": f"RAY_RAYLET_PID={raylet}",
            "driver": os.getpid(),
            "silence_s": silence_s,
            "sentence": sentence,
            "page": str(page),
        }
        self._write(json.dumps(facts))
        self._reader = threading.Thread(target=self._read, name="ray watch reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._ask_head, name="ray watch questions", daemon=True).start()

    def heard(self) -> None:
        """Tell the guard that this process is not blocked in a call of Ray, and will end by itself."""
        self._write("heard")

    def leaving(self) -> None:
        """Tell the guard that this process now ends its Ray itself, so that the end of Ray's processes is no loss."""
        self._write("leaving")

    def end_ray(self) -> None:
        """End the Ray that was started here, whatever state it is in; blocks for seconds."""
        self._write("end")
        if not self._ended.wait(_END_S):
            logger.error("Ray's processes on this machine did not end within %.0f s", _END_S)

    def close(self) -> None:
        """Stop watching. A repeated call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._write("bye")
            with suppress(OSError):
                assert self._guard.stdin is not None
                self._guard.stdin.close()
            self._guard.wait()
            self._reader.join()  # its end of the pipe is closed
            assert self._guard.stdout is not None
            self._guard.stdout.close()

    def _write(self, line: str) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.write(line.encode() + b"\n")

    def _read(self) -> None:
        """Read the guard's messages, and check for the head's answers."""
        assert self._guard.stdout is not None
        output, unread, num_missed, num_answers = self._guard.stdout.fileno(), b"", 0, 0
        while not self._closed.is_set():
            if not select.select([output], [], [], self._silence_s / _LOOKS)[0]:
                num_missed = 0 if self._num_answers > num_answers else num_missed + 1
                num_answers = self._num_answers
                if num_missed > _LOOKS:
                    self._lose(f"its head (GCS) has not answered for {self._silence_s:g} s")
                elif self._is_considered_dead:
                    self._lose("its head considers this node dead, because the raylet did not answer")
                continue
            data = os.read(output, 4096)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                if "lost" in message:
                    self._on_lost(message["lost"])
                else:
                    self._ended.set()

    def _lose(self, reason: str) -> None:
        self._on_lost(self._sentence.replace("{reason}", reason))

    def _ask_head(self) -> None:
        while not self._closed.wait(self._silence_s / _LOOKS / 2):
            try:
                nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
            except Exception as error:  # Ray raises many kinds; only missing answers count
                logger.debug("ray.nodes: %s", error)
                continue
            self._is_considered_dead = any(node["NodeID"] == self._node and not node["Alive"] for node in nodes)
            self._num_answers += 1


def raylet_here() -> int | None:
    """Return the process id of the raylet that this driver uses; None if it cannot be found."""
    node = ray._private.worker._global_node
    if node is None:
        return None
    mark = f"--raylet_socket_name={node.raylet_socket_name}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark in (entry / "cmdline").read_bytes().split(b"\0"):
                    return int(entry.name)
    return None


def owned_processes() -> dict[str, int]:
    """Return Ray's processes that this process has started, by name."""
    node = ray._private.worker._global_node
    return {name: infos[0].process.pid for name, infos in node.all_processes.items()} if node is not None else {}
