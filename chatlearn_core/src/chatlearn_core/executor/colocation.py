"""Time sharing of devices: a role that is used next gets the device memory it needs, and the other roles offload."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from chatlearn_core.exceptions import BackendError, TrainerLostError
from chatlearn_core.executor.device_sharing import DeviceUse, Move, OffloadMode, Sharing, find_sharing
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Device, MemoryEvent, MemoryPart, ModelGroup, Runtime
from chatlearn_core.runtime.plan import RolePlan


class ColocationManager:
    """Grants device leases, and offloads and onloads parts of roles around them.

    If no two roles share a device, leases are free: nothing waits and nothing moves.

    Args:
        runtime: hosts the roles.
        roles: the planned roles.
        mode: the setting ``colocation.offload``.
    """

    def __init__(
        self, runtime: Runtime, roles: Mapping[str, RolePlan] | None = None, mode: OffloadMode = "never"
    ) -> None:
        self.runtime = runtime
        self.roles = roles or {}
        self.mode = mode
        self.sharing = self._find_sharing()
        self._held: dict[str, dict[MemoryPart, bool | None]] = _all_live(self.sharing)
        self._queue: list[DeviceLease] = []
        self._locks = {role: asyncio.Lock() for role in self.roles}
        """Held while parts of a role are moved or must not move."""
        self._timers = Timers()
        """Timers of the latest lease, or of the start or recovery since then."""

    def _find_sharing(self) -> Sharing:
        return find_sharing(self.roles, self.runtime.devices(), self.mode) if self.mode != "never" else Sharing()

    async def start(self, timers: Timers) -> None:
        """Start the runtime. Roles that share devices start one after another; each is offloaded before the next.

        Args:
            timers: receive the durations of moves, as for a lease.
        """
        self.runtime.lend_weights = self.lend_weights
        self._timers = timers
        if self.sharing.devices:
            await self.runtime.start(self._put_aside)
        else:
            await self.runtime.start()
        planned, self.sharing = self.sharing, self._find_sharing()  # the places are exact only now
        held, self._held = self._held, _all_live(self.sharing)
        for role in planned.parts:
            if role in self._held:
                self._held[role] = held[role]
            else:  # it shares no device after all: from here on none of its parts are moved
                await self._carry_out(Move("onload", role, planned.parts[role]), timers, None)

    async def _put_aside(self, role: str) -> None:
        if parts := self.sharing.parts.get(role):
            await self._move(Move("offload", role, parts), self._timers, None)

    def lease(self, *uses: DeviceUse, timers: Timers, level: int | None = None) -> DeviceLease:
        """A place in the queue for the devices of ``uses``; enter it with ``async with``, or give it up with ``leave``.

        Leases on one device are granted in request order, even if a later one is ready first.

        Args:
            timers: receive the durations of moves, in ``timing_s/offload``, ``timing_s/onload`` and the trace.
            level: depth of the call in the flow, for the trace.
        """
        devices = self.sharing.contested(uses)
        lease = DeviceLease(self, uses, devices, [t for t in self._queue if t.devices & devices], timers, level)
        if devices:
            self._queue.append(lease)
        return lease

    async def recover(self, lost: TrainerLostError, timers: Timers) -> None:
        """Let the runtime rebuild a trainer that lost a rank, with the generators offloaded.

        The next use of a trainer checks which parts it holds then.

        Args:
            timers: receive the durations of moves, as for a lease.

        Raises:
            TrainerLostError: the trainer may not be rebuilt.
        """
        self._timers = timers
        for role, parts in self.sharing.parts.items():
            live = tuple(part for part in parts if self._held[role][part] is not False)
            if live and self.roles[role].kind == "generator":
                await self._move(Move("offload", role, live), timers, None)
        await self.runtime.recover(lost)
        for role, parts in self.sharing.parts.items():
            if self.roles[role].kind == "trainer":
                self._held[role] = dict.fromkeys(parts, None)

    async def make_room(self, uses: Sequence[DeviceUse], timers: Timers, level: int | None) -> None:
        """Make the moves needed before ``uses``; called by a lease that holds its devices exclusively."""
        self._timers = timers
        async with contextlib.AsyncExitStack() as stack:
            for role in self.sharing.affected(uses):  # a fixed locking order, to prevent deadlocks
                await stack.enter_async_context(self._locks[role])
            for move in self.sharing.moves(uses, self._held):
                await self._move(move, timers, level)

    @contextlib.asynccontextmanager
    async def lend_weights(self, role: str) -> AsyncIterator[None]:
        """Keep a trainer's weights on its devices during another role's lease, for a generator replica that is rebuilt
        between two syncs and loads them now. Meanwhile no other part of the trainer is moved.
        """
        if role not in self.sharing.parts:
            yield
            return
        async with self._locks[role]:
            asleep = self._held[role]["weights"] is not True
            if asleep:
                await self._move(Move("onload", role, ("weights",)), self._timers, None)
            try:
                yield
            finally:
                if asleep:
                    await self._move(Move("offload", role, ("weights",)), self._timers, None)

    def remove(self, lease: DeviceLease) -> None:
        """A lease is over."""
        if lease in self._queue:
            self._queue.remove(lease)

    async def _move(self, move: Move, timers: Timers, level: int | None) -> None:
        held = self._held[move.role]
        held.update(dict.fromkeys(move.parts, None))  # unknown until the move is done
        await self._carry_out(move, timers, level)
        held.update(dict.fromkeys(move.parts, move.action == "onload"))

    async def _carry_out(self, move: Move, timers: Timers, level: int | None) -> None:
        """Execute a move, record it in the trace, and check the live memory afterwards."""
        group = self._group(move.role)
        with timers.measure(move.action, role=move.role, action=move.action, level=level) as facts:
            events = await (group.offload if move.action == "offload" else group.onload)(move.parts)
            facts["live_bytes"] = _live_bytes(move, events)
        for event in events:
            if move.action == "offload" and event.live_bytes:
                raise BackendError(
                    f"role {event.role!r}, {self._worker(event)}: {event.part} were offloaded, but {event.live_bytes} "
                    "bytes of them are still live on the device. This is a fault of the backend's offload: it must "
                    "free the memory before it returns"
                )

    def _group(self, role: str) -> ModelGroup:
        if self.roles[role].kind == "trainer":
            return self.runtime.trainer(role)
        return self.runtime.generator(role)

    def _worker(self, event: MemoryEvent) -> str:
        kind = self.roles[event.role].kind
        return f"{'rank' if kind == 'trainer' else 'replica'} {event.worker}"


class DeviceLease:
    """A place in the queue for devices. While a lease is held, no role that shares one of its devices holds another."""

    def __init__(
        self,
        colocation: ColocationManager,
        uses: Sequence[DeviceUse],
        devices: frozenset[Device],
        earlier: Sequence[DeviceLease],
        timers: Timers,
        level: int | None,
    ) -> None:
        self.devices = devices
        self._colocation = colocation
        self._uses = uses
        self._earlier = earlier
        self._timers = timers
        self._level = level
        self._ended = asyncio.Event()

    async def __aenter__(self) -> None:
        try:
            for lease in self._earlier:
                await lease._ended.wait()
            if self.devices:
                await self._colocation.make_room(self._uses, self._timers, self._level)
        except BaseException:
            self.leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Release the lease to the next in the queue. Safe to call twice."""
        self._ended.set()
        self._colocation.remove(self)


def _all_live(sharing: Sharing) -> dict[str, dict[MemoryPart, bool | None]]:
    return {role: dict.fromkeys(parts, True) for role, parts in sharing.parts.items()}


def _live_bytes(move: Move, events: Sequence[MemoryEvent]) -> dict[str, Any]:
    """Part -> worker -> bytes in use after the move, for the trace."""
    return {part: {str(e.worker): e.live_bytes for e in events if e.part == part} for part in move.parts}
