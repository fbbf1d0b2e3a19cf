"""The driver of one rank of a data-parallel engine: all ranks step together.

Where ranks share a mixture of experts, a forward pass is a collective: a rank that steps alone waits forever. So every
rank is told the same things in the same order (``chatlearn_vllm.data_parallel``; a submission brings each rank its own
requests, or none), and what is done between two steps is the same on every rank:

- While no rank has requests, or all are paused or loading, a rank carries out its commands one after the other.
- After any of it, a rank sees from what it was told alone whether steps follow, as every other rank does at that very
  place. If so it goes on in lockstep: before each step the ranks agree how much all of them have been told, and whether
  anybody has work. First all do what all have been told; then all step, a rank without requests a dummy batch; or, when
  no rank has work, all leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .driver import EngineDriver


class LockstepDriver(EngineDriver):
    """Drives one rank. Calls of its methods must come in the same order on all ranks.

    What keeps the ranks alike, whether they are paused or loading, must change on all of them: if a call fails on one
    rank and not on others, whoever made it ends them all.
    """

    _may_have_work = False
    """Whether any rank has been given requests since all of them had none."""

    def _drive(self) -> None:
        while self._await_work():
            self._do_work(1)
            self._step_together()

    def _await_work(self) -> bool:
        with self._condition:
            while not (self._work or self._closing):
                self._condition.wait()
            return not self._closing

    @property
    def _steps_follow(self) -> bool:
        """The same on every rank that was told the same."""
        return self._may_have_work and not self._paused and not self._loading

    def _step_together(self) -> None:
        """Lockstep, until no steps follow."""
        has_just_worked = False
        while self._steps_follow:
            with self._condition:
                # Not twice in a row: requests would wait for a host that never falls silent.
                told = 0 if has_just_worked else len(self._work)
                closing = self._closing
            engine = self._require()
            told, busy, closing = engine.agree(told, busy=engine.has_work, closing=closing)
            if closing:
                with self._condition:
                    self._closing = True
                return
            has_just_worked = told > 0
            if told:
                self._do_work(told)
            elif busy:
                self._step()
            else:
                self._may_have_work = False

    def _submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self._may_have_work = True
        super()._submit(requests)
