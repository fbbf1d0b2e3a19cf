"""Which parts of its memory an engine has released."""

from __future__ import annotations

from collections.abc import Callable, Collection


class EngineMemory:
    """Translate requests to move memory parts into vLLM's operations: sleep by level, wake by part.

    vLLM can release the KV cache alone, or the weights together with the KV cache.
    """

    def __init__(self, move: Callable[[str, object], None], sleep_level: int) -> None:
        """Start with everything awake.

        Args:
            move: calls ``sleep`` or ``wake`` of the engine's driver and blocks.
            sleep_level: what sleep does with weights: 1 moves them to host memory, 2 drops them.
        """
        self._move = move
        self._sleep_level = sleep_level
        self._asked: set[str] = set()
        """Parts that a caller asked to offload."""
        self.asleep: set[str] = set()
        """Parts whose memory the engine has released."""
        self.weights_dropped = False
        """Whether the weights were dropped and only a sync restores them."""

    def offload(self, parts: Collection[str]) -> None:
        """Release ``weights`` or ``kv_cache``. A repeated call does nothing."""
        self._asked |= set(parts)
        if "weights" in parts and "weights" not in self.asleep:
            self._move("sleep", self._sleep_level)
            self.asleep = {"weights", "kv_cache"}
            self.weights_dropped = self._sleep_level == 2
        elif "kv_cache" in parts and not self.asleep:
            self._move("sleep", 0)
            self.asleep = {"kv_cache"}

    def onload(self, parts: Collection[str]) -> None:
        """Restore these parts, and parts that were released without a request. A repeated call does nothing."""
        self._asked -= set(parts)
        back = self.asleep - self._asked
        if back:
            self._move("wake", sorted(back))
            self.asleep -= back

    def problem(self) -> str | None:
        """Why the engine cannot generate now; None if it can."""
        if self._asked:
            return f"has {sorted(self._asked)[-1]!r} offloaded; onload it before generating"
        if self.weights_dropped:
            return "dropped its weights during sleep (sleep_level: 2); sync weights before generating"
        return None
