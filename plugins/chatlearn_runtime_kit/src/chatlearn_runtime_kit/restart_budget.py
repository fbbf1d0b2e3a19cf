"""Limits how often the workers of a role may be rebuilt in a run, and reports each restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from chatlearn_core.exceptions import BackendError, ReplicaLostError, RuntimeLostError, TrainerLostError, WorkerPlace
from chatlearn_core.protocols import RuntimeEvent

Tell = Callable[[RuntimeEvent], None]


class RestartBudget:
    """The restarts of one role: counted, reported, and refused once the limit is reached.

    Args:
        role: name of the role.
        limit: maximum number of restarts in a run: per worker, so that losing a machine with many workers costs each
            one restart; or in total with ``together``, if one dying worker takes the others with it.
        setting: configuration key of the limit, for messages.
        event: name of the reported event, such as ``replica_rebuilt``.
        error: class of the error raised at the limit.
        tell: receives the reports.
    """

    def __init__(
        self,
        role: str,
        limit: int,
        *,
        setting: str,
        event: str,
        error: type[BackendError] = ReplicaLostError,
        tell: Tell | None = None,
        together: bool = False,
    ) -> None:
        self.role = role
        self.limit = limit
        self.setting = setting
        self.event = event
        self.error = error
        self.tell = tell
        self.together = together
        self._spent: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Number of restarts of all workers so far."""
        return self._spent.total()

    def is_spent(self, worker: str) -> bool:
        """Whether ``worker`` has used a restart."""
        return self._spent[self._key(worker)] > 0

    def _key(self, worker: str) -> str:
        return "" if self.together else worker

    def spend(self, worker: str, cause: BaseException) -> None:
        """Use one restart of ``worker`` (``replica 0``).

        Raises:
            BackendError: no restart is left; has the role's error class, and ``cause`` as its cause.
            RuntimeLostError: it is the cause, and no restart helps.
        """
        if isinstance(cause, RuntimeLostError):
            raise cause
        key = self._key(worker)
        spent = self._spent[key]
        if spent >= self.limit:
            place = (cause.place if isinstance(cause, BackendError) else None) or WorkerPlace(self.role, worker)
            stack = cause.stack if isinstance(cause, BackendError) else ""
            raise self.error(
                f"role {self.role!r}: {worker} died, and {spent} restart(s), the limit ({self.setting}), are used "
                f"up. Last cause: {cause}"
            ).at(place, stack) from cause
        self._spent[key] = spent + 1
        which = f"restart {spent + 1} of at most {self.limit}, {self.setting}"
        self.report(worker, f"died and is rebuilt ({which}). {cause}", restart=spent + 1, limit=self.limit)

    def report(self, worker: str, what: str, **facts: int) -> None:
        """Report that a worker is rebuilt, and why."""
        if self.tell is not None:
            text = f"role {self.role!r}: {worker} {what}"
            self.tell(RuntimeEvent(self.event, text, {"role": self.role, "worker": worker, **facts}))

    def give_back(self, worker: str) -> None:
        """Return the last restart of ``worker``, which was not at fault."""
        self._spent[self._key(worker)] -= 1

    async def rebuild(self, worker: str, cause: BaseException, build: Callable[[], Awaitable[None]]) -> None:
        """Rebuild a worker, and repeat if it dies during that, while restarts are left.

        Raises:
            BackendError: no restart is left.
            TrainerLostError: ``build`` needed a trainer that lost a rank, which rebuilding this worker cannot fix.
        """
        while True:
            self.spend(worker, cause)
            try:
                await build()
            except BackendError as error:
                if isinstance(error, TrainerLostError) and self.error is not TrainerLostError:
                    raise
                cause = error
            else:
                return

    async def start(self, worker: str, build: Callable[[], Awaitable[None]]) -> None:
        """Build a worker for the first time; repeat if its process dies during that."""
        try:
            await build()
        except BackendError as error:
            if not is_death(error):
                raise
            await self.rebuild(worker, error, build)


def is_death(error: BaseException) -> bool:
    """Whether an error says that a process is gone, so that a new process may succeed."""
    return isinstance(error, BackendError) and error.process_is_gone
