"""Which parts of its memory an engine has given back."""

from __future__ import annotations

from collections.abc import Callable, Collection


class EngineMemory:
    """Turns requests to move parts into what vLLM can do: sleep by level, wake by part.

    vLLM gives back the KV cache alone, or the weights together with it.
    """

    def __init__(self, move: Callable[[str, object], None], sleep_level: int) -> None:
        """Everything is awake.

        Args:
            move: calls ``sleep`` or ``wake`` of the engine's driver, and blocks.
            sleep_level: what becomes of weights: 1 host memory, 2 nothing.
        """
        self._move = move
        self._sleep_level = sleep_level
        self._asked: set[str] = set()
        """Parts somebody wants out of the way."""
        self.asleep: set[str] = set()
        """Parts whose memory the engine has given back."""
        self.weights_dropped = False
        """Whether only a sync makes the weights right again."""

    def offload(self, parts: Collection[str]) -> None:
        """Give back ``weights`` or ``kv_cache``; twice is fine."""
        self._asked |= set(parts)
        if "weights" in parts and "weights" not in self.asleep:
            self._move("sleep", self._sleep_level)
            self.asleep = {"weights", "kv_cache"}
            self.weights_dropped = self._sleep_level == 2
        elif "kv_cache" in parts and not self.asleep:
            self._move("sleep", 0)
            self.asleep = {"kv_cache"}

    def onload(self, parts: Collection[str]) -> None:
        """Take back these parts, and what was given back without being asked for; twice is fine."""
        self._asked -= set(parts)
        back = self.asleep - self._asked
        if back:
            self._move("wake", sorted(back))
            self.asleep -= back

    def problem(self) -> str | None:
        """Why nothing can be generated; None if it can."""
        if self._asked:
            return f"has {sorted(self._asked)[-1]!r} offloaded; onload it before generating"
        if self.weights_dropped:
            return "dropped its weights when it slept (sleep_level: 2); sync weights before generating"
        return None
