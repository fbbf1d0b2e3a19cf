"""A cache of a judge's answers, keyed by the content of the question."""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from chatlearn_core.exceptions import ConfigError

_BUSY_S = 30.0
"""Longest time in seconds that a process waits while another one writes to the file."""


class AnswerCache(Protocol):
    """Interface of caches, which map keys to texts."""

    def get(self, key: str) -> str | None:
        """Return the text, or None if the cache does not have the key."""

    def put(self, key: str, answer: str) -> None:
        """Store a text."""

    def close(self) -> None:
        """Release everything. A repeated call does nothing."""


class NoCache:
    """A cache that stores nothing."""

    def get(self, key: str) -> str | None:
        return None

    def put(self, key: str, answer: str) -> None:
        """Discard the text."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class MemoryCache:
    """Keeps the most recently used texts, at most ``num_entries``."""

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._answers: OrderedDict[str, str] = OrderedDict()

    def get(self, key: str) -> str | None:
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def put(self, key: str, answer: str) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._num_entries:
            self._answers.popitem(last=False)

    def close(self) -> None:
        self._answers.clear()


class DiskCache:
    """Keeps texts in an SQLite file, which several processes may use at the same time. Blocks; any thread may call it.

    Raises:
        ConfigError: the file cannot be opened, or is not a cache of answers.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise ConfigError(f"cache_path {str(path)!r} cannot be used as a cache of answers: {error}") from error

    def get(self, key: str) -> str | None:
        with self._lock:
            assert self._connection is not None, "a closed cache is not asked"
            row = self._connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, answer: str) -> None:
        with self._lock:
            assert self._connection is not None, "a closed cache is not asked"
            self._connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, answer))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
