"""The Ray cluster of a run: starts or joins it, reserves resources, and leaves it as it was."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ConfigError, RuntimeLostError
from chatlearn_core.metrics.run_directory import FAILURE_PAGE
from chatlearn_ray.capacity import shortage
from chatlearn_ray.cluster_token import observe_token, use_token
from chatlearn_ray.gpus import NodeGpus, gpus_of_slot
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.placement import PlacementPlan, WorkerPlacement
from chatlearn_ray.resources import ResourceAmounts, amounts_text
from chatlearn_ray.watch import RayWatch, owned_processes

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_LOG_INTERVAL_S = 30.0
_POLL_INTERVAL_S = 1.0
_SHUTDOWN_S = 30.0
"""Longest time in seconds to leave a lost Ray."""


class Cluster:
    """The connection to Ray. A Ray that this process has already joined is used and left running."""

    def __init__(self, options: RayRuntimeOptions) -> None:
        self.options = options
        self._owns = False
        self._groups: dict[str, PlacementGroup] = {}
        self._gpu_queries: dict[str, asyncio.Lock] = {}
        """Slot -> lock, because a query of a slot's GPUs needs all of them."""
        self._watch: RayWatch | None = None
        self.lost: asyncio.Future[str] | None = None
        """Completes with a message when the workers' Ray is lost."""

    def require_room(self, placement_plan: PlacementPlan) -> None:
        """Check that a Ray started here could hold the run. A joined cluster is not checked, because it may grow.

        Raises:
            ConfigError: this machine cannot hold the run; shows the arithmetic.
        """
        if self.options.cluster_address is not None or ray.is_initialized():
            return
        missing = shortage(placement_plan, {"this machine": this_machine(self.options, placement_plan)})
        if missing is not None:
            raise ConfigError(f"the roles do not fit this machine:\n{missing}\n  {_REMEDY}")

    def join(self, placement_plan: PlacementPlan, run_dir: Path) -> None:
        """Start Ray on this machine, or join the cluster at ``address``, and watch it. Blocks for seconds.

        Args:
            placement_plan: the reservations.
            run_dir: directory for a failure page if the loss of Ray ends this process.

        Raises:
            BackendError: Ray does not start, or there is no cluster at the address.
        """
        if not ray.is_initialized():
            self._connect(placement_plan)
        loop = asyncio.get_running_loop()
        lost = self.lost = loop.create_future()

        def lose(sentence: str) -> None:
            if not lost.done():
                lost.set_result(sentence)
                if self._watch is not None:
                    self._watch.heard()

        def on_lost(sentence: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lose, sentence)

        self._watch = RayWatch(
            owned=owned_processes() if self._owns and self.options.cluster_address is None else {},
            silence_s=self.options.heartbeat_timeout_s,
            sentence=self._sentence(),
            page=run_dir / FAILURE_PAGE,
            on_lost=on_lost,
        )

    def _sentence(self) -> str:
        """Return the message about a lost Ray, with a placeholder ``{reason}``."""
        if self.options.cluster_address is None:
            remedy = (
                "All workers ended with it. Run the same command again: it restarts Ray and continues from the last "
                "checkpoint. The cause may be in /tmp/ray/session_latest/logs/raylet.out, or in the system log "
                "(out of memory?)"
            )
        else:
            remedy = (
                "The driver cannot reach any worker without it. Restart Ray on this node (chatlearn cluster up, or "
                "ray start), then run the same command: it continues from the last checkpoint"
            )
        where = self.options.cluster_address or "started by this run"
        return f"Ray ({where}) is lost on node {socket.gethostname()}: {{reason}}. {remedy}"

    def check(self) -> None:
        """Raise a RuntimeLostError if Ray is lost; calling Ray would then end this process."""
        if self.lost is not None and self.lost.done():
            raise RuntimeLostError(self.lost.result())

    def _connect(self, placement_plan: PlacementPlan) -> None:
        options = self.options
        arguments: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if options.working_dir is not None:
            arguments["runtime_env"] = {"working_dir": options.working_dir}
        if options.cluster_address is None:
            here = this_machine(options, placement_plan)
            arguments |= {
                "address": "local",
                "num_cpus": int(here["CPU"]),
                "num_gpus": int(here.get("GPU", 0)),
                "include_dashboard": False,
                "resources": {name: n for name, n in here.items() if name not in ("CPU", "GPU")},
                "object_store_memory": options.object_store_mb and options.object_store_mb * _MIB,
                "_temp_dir": options.temp_dir,
            }
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        else:
            arguments["address"] = options.cluster_address
            if options.token_file is not None:
                use_token(os.environ, Path(options.token_file), is_head=False, wait_s=0.0)
                observe_token()
        try:
            with _own_signal_handlers():
                ray.init(**arguments)
        except AuthenticationError as error:
            raise BackendError(f"the cluster at {options.cluster_address} {_NO_TOKEN}: {error}") from error
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            where = (
                "on this machine"
                if options.cluster_address is None
                else f"at {options.cluster_address} (runtime.options.address). If a cluster is there, it {_NO_TOKEN}"
            )
            raise BackendError(f"Ray did not start {where}: {type(error).__name__}: {error}") from error
        self._owns = True

    async def reserve(self, placement_plan: PlacementPlan) -> None:
        """Reserve every group of bundles. While the cluster is too small or busy, waits and logs what is missing.

        Raises:
            BackendError: the resources are not available after ``resource_wait_s``; names what is missing.
        """
        start = time.monotonic()
        said = 0.0
        while (missing := shortage(placement_plan, nodes())) is not None:
            self.check()
            waited = time.monotonic() - start
            if waited >= self.options.resource_wait_s or self.options.cluster_address is None:
                raise BackendError(f"the roles do not fit the cluster after {waited:.0f} s:\n{missing}\n  {_REMEDY}")
            if waited >= said:
                logger.warning("waiting for resources for %.0f s; missing:\n%s", waited, missing)
                said = waited + _LOG_INTERVAL_S
            await asyncio.sleep(_POLL_INTERVAL_S)
        for group in placement_plan.groups:
            self._groups[group.name] = placement_group([dict(b) for b in group.bundles], strategy=group.strategy)
        for name, reserved in self._groups.items():
            while not await asyncio.to_thread(reserved.wait, _POLL_INTERVAL_S):
                self.check()
                waited = time.monotonic() - start
                free = amounts_text(ray.available_resources())  # type: ignore[no-untyped-call]  # Ray has no types here
                state = f"{name} has been waiting for its place for {waited:.0f} s; free in the cluster: {free}"
                if waited >= self.options.resource_wait_s:
                    raise BackendError(
                        f"{state}. It needs {', '.join(amounts_text(b) for b in reserved.bundle_specs)}; other jobs "
                        "hold the rest (ray status). Raise runtime.options.resource_wait_s, or wait for them"
                    )
                if waited >= said:
                    logger.warning("%s", state)
                    said = waited + _LOG_INTERVAL_S

    def actor_options(self, placement: WorkerPlacement) -> dict[str, Any]:
        """Return Ray's options for an actor at a placement."""
        amounts = dict(placement.amounts)
        return {
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "resources": amounts,
            "scheduling_strategy": self._in_slot(placement),
        }

    def _in_slot(self, placement: WorkerPlacement) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            self._groups[placement.group],
            placement_group_bundle_index=placement.bundle,
            placement_group_capture_child_tasks=False,
        )

    async def gpus_of(self, placement: WorkerPlacement) -> NodeGpus | None:
        """Return the GPUs of a placement in a slot that the runtime divides; None if Ray divides the slot.

        The slot's reservation holds its GPUs, and only this method requests them from Ray, briefly. It asks again for
        each worker, because a slot whose node was lost gets other GPUs.

        Raises:
            BackendTimeoutError: the slot gets no node within ``start_timeout_s``.
            BackendError: the slot's node was lost in the meantime.
        """
        if not placement.gpus:
            return None
        of_slot = self._groups[placement.group].bundle_specs[placement.bundle]["GPU"]
        ask: Any = ray.remote(num_cpus=0, num_gpus=of_slot)(gpus_of_slot)
        async with self._gpu_queries.setdefault(placement.slot, asyncio.Lock()):
            reference = ask.options(scheduling_strategy=self._in_slot(placement)).remote()
            try:
                async with asyncio.timeout(self.options.start_timeout_s):
                    found: NodeGpus = await reference
            except TimeoutError:
                ray.cancel(reference, force=True)
                raise BackendTimeoutError(
                    f"{placement.slot} (role {placement.role!r}) got no node with {of_slot:g} GPUs within "
                    f"{self.options.start_timeout_s:g} s (runtime.options.start_timeout_s). Add one, or raise it"
                ) from None
            except RayError as error:
                raise BackendError(
                    f"{placement.slot} (role {placement.role!r}): its GPUs cannot be determined: {error}"
                ) from error
        return found.some(placement.gpus)

    def leave(self) -> None:
        """Release the reservations, and stop a Ray that was started here. A repeated call does nothing."""
        groups, self._groups = self._groups, {}
        watch, self._watch = self._watch, None
        is_lost = self.lost is not None and self.lost.done()
        try:
            if is_lost:
                self._leave_lost_ray(watch)
            elif ray.is_initialized():
                for group in groups.values():
                    remove_placement_group(group)
                if self._owns:
                    if watch is not None:
                        watch.leaving()
                    with _own_signal_handlers():
                        ray.shutdown()
        finally:
            if watch is not None and not is_lost:  # otherwise the guard must stay to end this process
                watch.close()
        self._owns = False

    def _leave_lost_ray(self, watch: RayWatch | None) -> None:
        """Leave a lost Ray without waiting for a stopped raylet, which would keep this process from ending."""
        if watch is not None:
            watch.end_ray()
        if not self._owns:
            return
        leaving = threading.Thread(target=ray.shutdown, name="ray shutdown", daemon=True)
        with _own_signal_handlers():
            leaving.start()
            leaving.join(_SHUTDOWN_S)
        if leaving.is_alive():
            logger.error("Ray did not shut down within %.0f s", _SHUTDOWN_S)
            atexit.unregister(ray.shutdown)


_NO_TOKEN = (
    "does not accept this driver's token, or the driver has none: name the cluster's token file "
    "(runtime.options.token_file), or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
)
_REMEDY = "Add nodes, or lower roles.*.ranks and replicas, or what they take (runtime.options.roles, pools)"


def this_machine(options: RayRuntimeOptions, placement_plan: PlacementPlan) -> ResourceAmounts:
    """Return the resources of a Ray started here: real GPUs, and as many CPUs and custom resources as requested."""
    import torch

    need = placement_plan.total
    cpus = options.num_cpus or max(os.cpu_count() or 1, -int(-need.get("CPU", 0.0) // 1))
    gpus = torch.cuda.device_count() if options.num_gpus is None else options.num_gpus
    custom = {name: amount for name, amount in need.items() if name not in ("CPU", "GPU")}
    return {"CPU": float(cpus), "GPU": float(gpus), **custom}


def nodes() -> Mapping[str, ResourceAmounts]:
    """Return the live nodes with their total resources."""
    listed = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
    return {
        f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}": node["Resources"] for node in listed if node["Alive"]
    }


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the program's own signal handlers, because Ray replaces the one for SIGTERM."""
    try:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
