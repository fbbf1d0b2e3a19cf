"""The trainer's process of ``weight_sync.py``: senders, and a pipe to a generator's process for a runtime."""

from __future__ import annotations

import os
import socket
import statistics
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from process_costs import Costs
from torch import Tensor, multiprocessing
from weight_sync_end import generator_end
from weight_sync_loopback import send_pieces
from weight_sync_model import MB, MemoryTrainer, total_bytes

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import Channel, WeightSyncSpec
from chatlearn_core.types import Endpoint, SyncRequest
from chatlearn_testing.model_directory import manifest_of

TIMEOUT_S = 300.0
ENDS = ("trainer", "generator")


class TrainerEnd:
    """One trainer rank and one generator process; any number of transports, one after the other."""

    def __init__(
        self, model: Path, workspace: Path, *, engine: str, dtype: str, python: str | None, bucket_mb: int
    ) -> None:
        """Start the generator's process; returns when its engine is ready. No engine: it takes and forgets."""
        self._registry = discover_plugins()
        self._workspace, self._bucket_mb = workspace, bucket_mb
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=generator_end, args=(other, str(model), engine, dtype, python))
        self._process.start()
        other.close()
        self._here = Endpoint("trainer", 0, 0, socket.gethostname(), "cpu", os.getpid())
        self._senders: dict[str, Any] = {}
        self._version = 0
        self._base: int | None = None
        self._there: Endpoint = self._answer()

    def sync(
        self, record: WeightSyncSpec, channel: Channel, trainer: MemoryTrainer, *, delta: bool = False
    ) -> dict[str, Any]:
        """One sync; seconds from the offer to the generator's confirmation, and what else was measured."""
        plan = self._plan(record, channel, trainer.tensors)
        if delta:
            assert self._base is not None, "a full sync comes before"
            plan = replace(plan, payload="delta", base_version=self._base)
        if record.name == "direct":
            alone = self._ask("direct", plan)
            return {
                **alone,
                "cpu_s": {"trainer": 0.0, "generator": alone["cpu_s"]},
                "peak_mb": {"both": alone["peak_mb"]},
            }
        sender = self._sender(record)
        failure: list[BaseException] = []
        costs = Costs(alone=True)
        offer = sender.offer(plan)
        self._pipe.send(("receive", record.name, plan, offer))

        def send() -> None:
            try:
                sender.send(plan, trainer)
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        answer = self._pipe.recv()
        thread.join()
        seconds, cpu_s, peak_mb = costs.seconds(), costs.cpu_s(), costs.peak_mb()
        sender.release(plan)
        if failure or isinstance(answer, str):
            raise RuntimeError(f"{record.name}: {answer}; {failure}")
        self._base = plan.policy_version
        return {
            "s": seconds,
            "bytes": answer["bytes"],
            "peak_mb": {"trainer": peak_mb, "generator": answer["peak_mb"]},
            "cpu_s": {"trainer": cpu_s, "generator": answer["cpu_s"]},
        }

    def measure(self, record: WeightSyncSpec, channel: Channel, tensors: Mapping[str, Tensor], repeats: int) -> Any:
        """The first sync, and the median of the following ones."""
        trainer = MemoryTrainer(tensors)
        runs = [self.sync(record, channel, trainer) for _ in range(repeats + 1)]
        warm = [run["s"] for run in runs[1:]]
        return {
            "channel": channel,
            "first_s": round(runs[0]["s"], 3),
            "s": round(statistics.median(warm), 4),
            "range_s": [round(min(warm), 4), round(max(warm), 4)],
            "gb_s": round(total_bytes(tensors) / statistics.median(warm) / 1e9, 2),
            "cpu_s": {end: round(statistics.median(run["cpu_s"][end] for run in runs[1:]), 4) for end in ENDS},
            "peak_extra_mb": {
                end: round(max(run["peak_mb"][end] for run in runs), 1) for end in sorted(runs[0]["peak_mb"])
            },
        }

    def from_memory(self, repeats: int) -> tuple[float, float]:
        """Seconds, and CPU seconds, of the engine taking the same tensors out of memory that it can read."""
        runs = []
        for _ in range(repeats + 1):
            self._version += 1
            runs.append(self._ask("from_memory", self._version))
        self._ask("forget")
        return (statistics.median(run["s"] for run in runs[1:]), statistics.median(run["cpu_s"] for run in runs[1:]))

    def loopback_s(self, num_bytes: int, num_groups: int, repeats: int) -> float:
        """Median seconds of gloo alone for so many bytes, through so many groups at once."""

        def tell(port: int) -> None:
            self._pipe.send(("loopback", port, num_bytes, num_groups))

        seconds = []
        for _ in range(repeats + 1):
            seconds.append(send_pieces(num_bytes, num_groups, tell))
            self._answer()
        return statistics.median(seconds[1:])

    def forget(self) -> None:
        """Let the generator's process give back what it holds for ``direct``."""
        self._ask("forget")

    def close(self) -> None:
        """End the generator's process and every sender."""
        for sender in self._senders.values():
            sender.close()
        if self._process.is_alive():
            self._pipe.send(("close",))
        self._process.join(TIMEOUT_S)

    def _plan(self, record: WeightSyncSpec, channel: Channel, tensors: Mapping[str, Tensor]) -> SyncRequest:
        self._version += 1
        direct = record.name == "direct"
        return SyncRequest(
            sync_id=f"v{self._version}",
            policy_version=self._version,
            base_version=None,
            payload="full",
            channel=channel,
            export="full_tensors",
            manifest=manifest_of(tensors),
            senders=(self._there if direct else self._here,),
            receivers=(self._there,),
            fleet_rule="barrier",
            bucket_bytes=self._bucket_mb * MB,
            timeout_s=TIMEOUT_S,
            workspace=str(self._workspace / record.name),
        )

    def _sender(self, record: WeightSyncSpec) -> Any:
        if record.name not in self._senders:
            options = self._registry.load_options(record)()
            self._senders[record.name] = self._registry.load_factory(record, "sender")(options, self._here)
        return self._senders[record.name]

    def _ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self._answer()

    def _answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer
