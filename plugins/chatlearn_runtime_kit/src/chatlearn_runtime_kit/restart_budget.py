"""How often the workers of a role may be rebuilt in a run, and the telling of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from chatlearn_core.exceptions import BackendError, ReplicaLostError, RuntimeLostError, TrainerLostError, WorkerPlace
from chatlearn_core.protocols import RuntimeEvent

Tell = Callable[[RuntimeEvent], None]


class RestartBudget:
    """The restarts of one role: counted, reported, and refused when the limit is reached.

    Args:
        role: its name.
        limit: how many a run may have: of each worker, so that the loss of a machine with many of them costs each one
            restart, or of all together where one that dies takes the others with it (``together``).
        setting: the key of the limit, for messages.
        event: name of what is reported, such as ``replica_rebuilt``.
        error: what is raised when the limit is reached.
        tell: takes the reports.
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
        """Restarts of all workers so far."""
        return self._spent.total()

    def is_spent(self, worker: str) -> bool:
        """Whether ``worker`` has taken a restart."""
        return self._spent[self._key(worker)] > 0

    def _key(self, worker: str) -> str:
        return "" if self.together else worker

    def spend(self, worker: str, cause: BaseException) -> None:
        """Take one restart of ``worker`` (``replica 0``).

        Raises:
            BackendError: none is left; of the class that the role uses, with ``cause`` as its cause.
            RuntimeLostError: that is the cause; no restart helps.
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
        """Tell that a worker is rebuilt, and why."""
        if self.tell is not None:
            text = f"role {self.role!r}: {worker} {what}"
            self.tell(RuntimeEvent(self.event, text, {"role": self.role, "worker": worker, **facts}))

    def give_back(self, worker: str) -> None:
        """The last restart of ``worker`` was not its fault."""
        self._spent[self._key(worker)] -= 1

    async def rebuild(self, worker: str, cause: BaseException, build: Callable[[], Awaitable[None]]) -> None:
        """Build a worker anew, and once more when it dies of that, as long as restarts are left.

        Raises:
            BackendError: none is left.
            TrainerLostError: ``build`` needed a trainer that lost a rank, which no rebuilding here helps.
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
        """Build a worker for the first time; one whose process dies of it is built again."""
        try:
            await build()
        except BackendError as error:
            if not is_death(error):
                raise
            await self.rebuild(worker, error, build)


def is_death(error: BaseException) -> bool:
    """Whether an error says that a process is gone, which another one may survive."""
    return isinstance(error, BackendError) and error.process_is_gone
