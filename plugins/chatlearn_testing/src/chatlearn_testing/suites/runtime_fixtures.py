"""Fixtures of the runtime suite: plans with fakes as roles, which worker processes can import, and killed workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import Kind
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import LossOutput, ModelSource, Runtime, RuntimeEvent
from chatlearn_core.runtime.plan import BackendPlan, Refresh, RolePlan, RunPlan, WeightRoute
from chatlearn_core.types import (
    Completion,
    Derived,
    GenerateRequest,
    Metric,
    OutputRequest,
    Outputs,
    Prompt,
    Sample,
    SamplingParams,
    TrainBatch,
    sample_from_completion,
)
from chatlearn_testing.batches import MaskedPolicyLoss, make_batch
from chatlearn_testing.fake_environment import FakeEnvironment
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.suites.conformance_suite import ConformanceSuite

VOCAB_SIZE = 32
SYNC_TIMEOUT_S = 60.0
ENTRY_POINTS = "[chatlearn]\nfakes = chatlearn_testing.fakes.plugin\n"
_PROCESS = re.compile(r"process (\d+)")


def doubled(batch: TrainBatch) -> Derived:
    """Derive data from a rank's slice of a batch; a module-level function, so that it can be pickled."""
    return Derived(
        {"doubled": 2.0 * batch.token_ids},
        {"length": torch.tensor(batch.lengths, dtype=torch.float64)},
        {batch.sample_ids[0]: "the first of a slice"},
        {"token_ids": Metric(float(batch.token_ids.sum()), reducer="sum")},
    )


@dataclass(frozen=True)
class WaitingLoss(MaskedPolicyLoss):
    """Blocks in the trainer as long as the file ``path`` exists."""

    path: Path = Path()

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """See ``Loss``."""
        while self.path.exists():
            time.sleep(0.01)
        return super().__call__(outputs, batch)


@dataclass
class Stand:
    """Builds plans, starts runtimes, and closes them when the test ends."""

    suite: type[ConformanceSuite]
    registry: PluginRegistry
    model: Path
    run_dir: Path
    events: list[RuntimeEvent] = field(default_factory=list)
    """Events that the runtimes reported."""
    _runtimes: list[Runtime] = field(default_factory=list)

    def role(
        self,
        name: str,
        kind: Kind,
        *,
        ranks: int = 1,
        replicas: int = 1,
        timeout_s: float = 60.0,
        model: Path | None = None,
        **options: object,
    ) -> RolePlan:
        """Build the plan of a role that uses the fake backend of its kind."""
        record: Any = self.registry.select(kind, "fake")
        source = ModelSource(str(model or self.model), str(self.model), vocab_size=VOCAB_SIZE)
        return RolePlan(
            name=name,
            kind=kind,
            backends=(BackendPlan(f"roles.{name}", record, self.registry.load_options(record)(**options)),),
            model=None if kind == "reward" else source,
            head="lm",
            device="cpu",
            replicas=replicas,
            ranks=ranks,
            trainable=True,
            engine={},
            timeout_s=timeout_s,
        )

    def plan(self, *roles: RolePlan) -> RunPlan:
        """Build a plan of these roles, with a weight route from every trainer to every generator."""
        trainers, generators = ([role.name for role in roles if role.kind == kind] for kind in ("trainer", "generator"))
        record: Any = self.registry.select("weight_sync", "fake_boxes")
        routes = tuple(
            WeightRoute(
                trainer,
                generator,
                record,
                self.registry.load_options(record)(),
                "the suite's",
                fleet_rule="barrier",
                bucket_bytes=1 << 20,
                timeout_s=SYNC_TIMEOUT_S,
            )
            for trainer in trainers
            for generator in generators
        )
        return RunPlan(self.registry, {role.name: role for role in roles}, routes, self.run_dir, seed=0)

    def following(self, role: RolePlan, source: str, decay: float) -> RolePlan:
        """Make a trainer role follow the weights of the role ``source`` over the suite's transport."""
        record: Any = self.registry.select("weight_sync", "fake_boxes")
        options = self.registry.load_options(record)()
        route = WeightRoute(source, role.name, record, options, "the suite's", "barrier", 1 << 20, SYNC_TIMEOUT_S)
        return replace(role, trainable=False, refresh=Refresh(source, 1, decay, route))

    def build(self, plan: RunPlan, **options: object) -> Any:
        """Build the runtime under test without starting it; ignores options that it does not have."""
        runtime: Runtime = self.suite.build()(self.suite.make_options(**options), plan)
        runtime.on_event = self.events.append
        self._runtimes.append(runtime)
        return runtime

    def local_runtime(self, *roles: RolePlan) -> Runtime:
        """Build the runtime ``local`` with these roles without starting it; tests compare with its results."""
        record = self.registry.select("runtime", "local")
        runtime: Runtime = self.registry.load_factory(record)(self.registry.load_options(record)(), self.plan(*roles))
        return runtime

    async def start(self, *roles: RolePlan, **options: object) -> Any:
        """Build and start the runtime under test with these roles."""
        runtime = self.build(self.plan(*roles), **options)
        await runtime.start()
        return runtime

    async def close(self) -> None:
        """Close every runtime that ``build`` made."""
        for runtime in self._runtimes:
            await runtime.close()


def process_of(runtime: Runtime, role: str, index: int) -> int | None:
    """Return a worker's process id from the runtime's description; None if the worker has no separate process."""
    places: Sequence[str] = runtime.describe()[role].get("places", ())
    found = _PROCESS.search(places[index]) if index < len(places) else None
    return int(found[1]) if found else None


async def kill_replica(runtime: Any, role: str, index: int) -> None:
    """Kill a replica's process; without a separate process, make its engine fail."""
    process = process_of(runtime, role, index)
    if process is None:
        await runtime.generator(role).replicas[index].loader.fail("the suite killed its engine")
    else:
        os.kill(process, signal.SIGKILL)


def request(name: str, *, max_tokens: int = 12, temperature: float = 1.0) -> GenerateRequest:
    """Build a request in its own group; its name determines prompt and seed."""
    seed = sum(name.encode())
    sampling = SamplingParams(max_tokens, temperature, seed=seed, ignore_eos=True)
    return GenerateRequest(name, np.array([3, 7, 1 + seed % (VOCAB_SIZE - 1)]), sampling, name)


async def generated(runtime: Any, names: Sequence[str], role: str = "generator") -> list[Completion]:
    """Submit the named requests together; returns their completions in order."""
    fleet = runtime.generator(role)
    completions: list[Completion] = await asyncio.gather(*(fleet.generate(request(name)) for name in names))
    return completions


def tokens(runtime: Runtime, completions: Sequence[Completion]) -> list[list[int]]:
    """Return the token ids of each completion."""
    return [completion.token_ids.tolist() for completion in runtime.data.get_completions(completions, {"token_ids"})]


def samples_of(completions: Sequence[Completion]) -> list[Sample]:
    """Build one sample per completion."""
    names = [completion.request_id for completion in completions]
    prompts = [Prompt(name, request(name).prompt_ids, "") for name in names]
    return [
        sample_from_completion(name, name, prompt, completion)
        for name, prompt, completion in zip(names, prompts, completions, strict=True)
    ]


def prepared(lengths: Sequence[int], seed: int = 0) -> TrainBatch:
    """Build a mini-batch with the data that ``MaskedPolicyLoss`` needs."""
    return MaskedPolicyLoss().prepare(make_batch(VOCAB_SIZE, lengths, seed))


LOGPROBS = OutputRequest(frozenset({"logprobs"}))


class RuntimeFixtures:
    """Base of ``RuntimeConformance``."""

    @pytest.fixture(scope="class")
    @classmethod
    def plugins(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginRegistry]:
        """The installed plugins and the fakes; worker processes import the fakes from the driver's module path."""
        site = tmp_path_factory.mktemp("fakes")
        FakeEnvironment(site).install("chatlearn-testing-fakes", entry_points=ENTRY_POINTS)
        sys.path.append(str(site))
        yield discover_plugins()
        sys.path.remove(str(site))

    @pytest.fixture
    def stand(self, plugins: PluginRegistry, tmp_path: Path) -> Stand:
        """Plans and runtimes of one test."""
        suite: Any = type(self)
        return Stand(suite, plugins, build_bigram_model(tmp_path / "model", vocab_size=VOCAB_SIZE), tmp_path / "run")

    def run(self, stand: Stand, test: Callable[[], Awaitable[None]]) -> None:
        """Run a test for at most ``patience_s``, then close its runtimes."""
        patience_s: float = self.patience_s  # type: ignore[attr-defined]  # of the suite

        async def bounded() -> None:
            async with asyncio.timeout(patience_s):
                try:
                    await test()
                finally:
                    await stand.close()

        asyncio.run(bounded())


@contextlib.contextmanager
def blocking_file(folder: Path) -> Iterator[Path]:
    """Yield a file that blocks every ``WaitingLoss`` on it; leaving the ``with`` deletes it and unblocks them."""
    path = folder / "wait"
    path.touch()
    try:
        yield path
    finally:
        path.unlink()
