"""The Ray cluster of a run: started here or joined, resources reserved, and left as it was found."""

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
_SAY_EVERY_S = 30.0
_LOOK_EVERY_S = 1.0
_SHUTDOWN_S = 30.0
"""How long the leaving of a Ray that is lost may take."""


class Cluster:
    """Joins Ray once; a Ray that this process had already is used and left running."""

    def __init__(self, options: RayRuntimeOptions) -> None:
        self.options = options
        self._owns = False
        self._groups: dict[str, PlacementGroup] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        """By slot: who asks for its GPUs needs all of them."""
        self._watch: RayWatch | None = None
        self.lost: asyncio.Future[str] | None = None
        """Done, with a sentence, when what the workers stand on is gone."""

    def require_room(self, placement_plan: PlacementPlan) -> None:
        """Check a run against a Ray that would be started here; a cluster that is joined may still grow.

        Raises:
            ConfigError: this machine cannot hold it; shows the arithmetic.
        """
        if self.options.cluster_address is not None or ray.is_initialized():
            return
        missing = shortage(placement_plan, {"this machine": this_machine(self.options, placement_plan)})
        if missing is not None:
            raise ConfigError(f"the roles do not fit this machine:\n{missing}\n  {_REMEDY}")

    def join(self, placement_plan: PlacementPlan, run_dir: Path) -> None:
        """Start Ray on this machine, or connect to the cluster that ``address`` names, and watch it from then on.
        Blocks for seconds.

        Args:
            run_dir: where a failure page is written if Ray takes this process with it.

        Raises:
            BackendError: Ray does not start, or there is no cluster at that address.
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
        """What it means that Ray is lost."""
        if self.options.cluster_address is None:
            remedy = (
                "All workers ended with it. Run the same command again: it starts Ray anew and goes on from the last "
                "checkpoint. What ended it may be in /tmp/ray/session_latest/logs/raylet.out, or in the log of the "
                "system (no memory left?)"
            )
        else:
            remedy = (
                "The driver cannot reach any worker without it. Start Ray on this node again (chatlearn cluster up, or "
                "ray start), then run the same command: it goes on from the last checkpoint"
            )
        where = self.options.cluster_address or "started by this run"
        return f"Ray ({where}) is lost on node {socket.gethostname()}: {{reason}}. {remedy}"

    def check(self) -> None:
        """Raises RuntimeLostError: Ray is lost, and must not be called any more: it would end this process."""
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
        """Reserve every group of bundles; waits while the cluster is too small or busy, and says what is missing.

        Raises:
            BackendError: not there after ``resource_wait_s``; names what is missing.
        """
        start = time.monotonic()
        said = 0.0
        while (missing := shortage(placement_plan, nodes())) is not None:
            self.check()
            waited = time.monotonic() - start
            if waited >= self.options.resource_wait_s or self.options.cluster_address is None:
                raise BackendError(f"the roles do not fit the cluster, after {waited:.0f} s:\n{missing}\n  {_REMEDY}")
            if waited >= said:
                logger.warning("waiting for resources since %.0f s; missing:\n%s", waited, missing)
                said = waited + _SAY_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
        for group in placement_plan.groups:
            self._groups[group.name] = placement_group([dict(b) for b in group.bundles], strategy=group.strategy)
        for name, reserved in self._groups.items():
            while not await asyncio.to_thread(reserved.wait, _LOOK_EVERY_S):
                self.check()
                waited = time.monotonic() - start
                free = amounts_text(ray.available_resources())  # type: ignore[no-untyped-call]  # Ray has no types here
                state = f"{name} waits for its place since {waited:.0f} s; free in the cluster: {free}"
                if waited >= self.options.resource_wait_s:
                    raise BackendError(
                        f"{state}. It needs {', '.join(amounts_text(b) for b in reserved.bundle_specs)}; other jobs "
                        "hold the rest (ray status). Raise runtime.options.resource_wait_s, or wait for them"
                    )
                if waited >= said:
                    logger.warning("%s", state)
                    said = waited + _SAY_EVERY_S

    def actor_options(self, placement: WorkerPlacement) -> dict[str, Any]:
        """How to ask Ray for an actor on a placement."""
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
        """Which GPUs a placement's share of its slot is; None where Ray divides the slot.

        The slot's reservation holds its GPUs, and nobody asks Ray for one of them except this, for a moment. Asked anew
        for each worker that is launched: a slot whose node was lost has others.

        Raises:
            BackendTimeoutError: the slot has no node within ``start_timeout_s``.
            BackendError: its node was lost meanwhile.
        """
        if not placement.gpus:
            return None
        of_slot = self._groups[placement.group].bundle_specs[placement.bundle]["GPU"]
        ask: Any = ray.remote(num_cpus=0, num_gpus=of_slot)(gpus_of_slot)
        async with self._asking.setdefault(placement.slot, asyncio.Lock()):
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
                    f"{placement.slot} (role {placement.role!r}): its GPUs cannot be had: {error}"
                ) from error
        return found.some(placement.gpus)

    def leave(self) -> None:
        """Give reservations back, and stop a Ray that was started here. Twice is fine."""
        groups, self._groups = self._groups, {}
        watch, self._watch = self._watch, None
        is_lost = self.lost is not None and self.lost.done()
        try:
            if is_lost:
                self._leave_what_is_lost(watch)
            elif ray.is_initialized():
                for group in groups.values():
                    remove_placement_group(group)
                if self._owns:
                    if watch is not None:
                        watch.leaving()
                    with _own_signal_handlers():
                        ray.shutdown()
        finally:
            if watch is not None and not is_lost:  # else the guard sees to it that this process ends
                watch.close()
        self._owns = False

    def _leave_what_is_lost(self, watch: RayWatch | None) -> None:
        """A raylet that is stopped would keep this process from ending."""
        if watch is not None:
            watch.end_ray()
        if not self._owns:
            return
        leaving = threading.Thread(target=ray.shutdown, name="ray shutdown", daemon=True)
        with _own_signal_handlers():
            leaving.start()
            leaving.join(_SHUTDOWN_S)
        if leaving.is_alive():
            logger.error("Ray does not let this process leave within %.0f s", _SHUTDOWN_S)
            atexit.unregister(ray.shutdown)


_NO_TOKEN = (
    "does not take this driver's token, or the driver has none: name the file that the cluster was brought up with "
    "(runtime.options.token_file), or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
)
_REMEDY = "Add nodes, or lower roles.*.ranks and replicas, or what they take (runtime.options.roles, pools)"


def this_machine(options: RayRuntimeOptions, placement_plan: PlacementPlan) -> ResourceAmounts:
    """What a Ray started here offers: real GPUs; CPUs and custom resources are names, so as many as are asked for."""
    import torch

    need = placement_plan.total
    cpus = options.num_cpus or max(os.cpu_count() or 1, -int(-need.get("CPU", 0.0) // 1))
    gpus = torch.cuda.device_count() if options.num_gpus is None else options.num_gpus
    custom = {name: amount for name, amount in need.items() if name not in ("CPU", "GPU")}
    return {"CPU": float(cpus), "GPU": float(gpus), **custom}


def nodes() -> Mapping[str, ResourceAmounts]:
    """Nodes that are alive and their total resources."""
    listed = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
    return {
        f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}": node["Resources"] for node in listed if node["Alive"]
    }


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray puts its own handler on SIGTERM; the program's stays."""
    try:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
