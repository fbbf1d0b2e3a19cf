"""The driver of one rank of a data-parallel engine: all ranks step together.

Ranks that share a mixture of experts run each forward pass as a collective: a rank that steps alone waits forever.
Every rank therefore receives the same commands in the same order (``chatlearn_vllm.data_parallel``; a submission
carries each rank's own requests, or none), and all ranks run the same commands between two steps:

- While no rank has requests, or all ranks are paused or loading, a rank runs its commands one after the other.
- After each command, a rank decides from the commands alone whether steps follow; every other rank decides the same at
  the same point. If steps follow, the rank enters lockstep: before each step the ranks agree on the number of commands
  that all of them have received, and on whether any rank has work. First all ranks run those commands. Then all step,
  a rank without requests with a dummy batch; or, if no rank has work, all leave lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .driver import EngineDriver


class LockstepDriver(EngineDriver):
    """Drive one rank. Method calls must come in the same order on all ranks.

    The states "paused" and "loading" must change on all ranks. If a call fails on only some ranks, the caller must end
    all of them.
    """

    _may_have_work = False
    """Whether any rank may hold requests: set by a submission, cleared when all ranks are idle."""

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
        """Whether steps follow; equal on all ranks that received the same commands."""
        return self._may_have_work and not self._paused and not self._loading

    def _step_together(self) -> None:
        """Step in lockstep with the other ranks until no steps follow."""
        has_just_run_commands = False
        while self._steps_follow:
            with self._condition:
                # Never run commands twice in a row: a steady flow of commands would starve the requests.
                num_ready = 0 if has_just_run_commands else len(self._work)
                closing = self._closing
            engine = self._require()
            num_ready, busy, closing = engine.agree(num_ready, busy=engine.has_work, closing=closing)
            if closing:
                with self._condition:
                    self._closing = True
                return
            has_just_run_commands = num_ready > 0
            if num_ready:
                self._do_work(num_ready)
            elif busy:
                self._step()
            else:
                self._may_have_work = False

    def _submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self._may_have_work = True
        super()._submit(requests)
