"""Light backends in which processes are killed or stopped: each says where it is, and where a trap waits, it springs.

The folder that ``CHATLEARN_FAULTS`` names holds ``trap.json`` while a trap is set: the call in which it springs, the
kind of process that must be in that call, and the victim: a kind that is killed, or ``frozen-`` and a kind that is
stopped. Every process writes down its id there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import EnvironmentSpec, GeneratorSpec, RewardSpec, TrainerSpec
from chatlearn_core.types import RewardResult
from chatlearn_testing.fakes.generator import FakeGenerator, FakeWeightLoader
from chatlearn_testing.fakes.options import FakeOptions
from chatlearn_testing.fakes.records import FAKE_BOX_SYNC, FAKE_GENERATOR, FAKE_REWARD, FAKE_TRAINER
from chatlearn_testing.fakes.reward import FakeReward
from chatlearn_testing.fakes.trainer import FakeTrainer

OPTIONS = "chatlearn_testing.fakes.options"
FROZEN = "frozen-"


@hookimpl
def chatlearn_trainers():
    return [_record(TrainerSpec, FAKE_TRAINER, "TrappedTrainer")]


@hookimpl
def chatlearn_generators():
    return [_record(GeneratorSpec, FAKE_GENERATOR, "TrappedGenerator", model_families=None)]


@hookimpl
def chatlearn_rewards():
    return [_record(RewardSpec, FAKE_REWARD, "TrappedReward")]


@hookimpl
def chatlearn_environments():
    factory = f"{__name__}:TrappedEnvironment"
    return [EnvironmentSpec(name="trapped", factory=factory, options=f"{__name__}:ConversationOptions")]


@hookimpl
def chatlearn_weight_syncs():
    return [replace(FAKE_BOX_SYNC, name="trapped")]


def _record(cls, record, name, **changed):
    assert isinstance(record, cls)
    return replace(record, name="trapped", factory=f"{__name__}:{name}", **changed)


class Folder:
    """What processes of one run tell each other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trap = path / "trap.json"

    def enrol(self, kind: str, number: int) -> None:
        """Write down who this process is; workers of one node have one parent."""
        facts = {"kind": kind, "number": number, "pid": os.getpid(), "node": os.getppid()}
        file = self.path / f"process-{os.getpid()}.json"
        file.with_suffix(".tmp").write_text(json.dumps(facts))
        file.with_suffix(".tmp").rename(file)

    def processes(self) -> list[dict]:
        """Everyone who ever enrolled, in order."""
        return [json.loads(file.read_text()) for file in sorted(self.path.glob("process-*.json"))]

    def arm(self, call: str, by: str, victim: str) -> None:
        """Set the trap. ``by``: the kind of process, or ``any``."""
        self.trap.with_suffix(".tmp").write_text(json.dumps({"call": call, "by": by, "victim": victim}))
        self.trap.with_suffix(".tmp").rename(self.trap)

    def sprung(self) -> list[dict]:
        """What happened."""
        return [json.loads(file.read_text()) for file in sorted(self.path.glob("sprung-*.json"))]

    def note_weights(self, version: int, digest: str) -> None:
        """This process samples from these weights under this version."""
        with (self.path / f"weights-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"version": version, "digest": digest, "time": time.time()}) + "\n")

    def weights(self) -> list[dict]:
        """What anyone sampled from."""
        files = sorted(self.path.glob("weights-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def reach(self, call: str, kind: str) -> None:
        """This process is inside ``call``: the trap may spring, once."""
        try:
            trap = json.loads(self.trap.read_text())
            if trap["call"] != call or trap["by"] not in (kind, "any"):
                return
            taken = self.path / f"taken-{os.getpid()}.json"
            self.trap.rename(taken)  # one process alone succeeds
        except FileNotFoundError:
            return
        trap["time"] = time.time()
        victim = trap["victim"].removeprefix(FROZEN)
        trap["pids"] = self._victims(victim, kind)
        taken.write_text(json.dumps(trap))
        taken.rename(self.path / f"sprung-{len(self.sprung())}.json")
        for pid in trap["pids"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if victim == trap["victim"] else signal.SIGSTOP)

    def thaw(self) -> None:
        """Let everyone go on who was stopped: a node that comes back finds that it was given up."""
        for trap in self.sprung():
            for pid in trap["pids"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _victims(self, victim: str, kind: str) -> list[int]:
        if victim == kind:
            return [os.getpid()]
        if victim == "raylet":
            return [os.getppid()]
        if victim == "node":
            pids = self._everyone_on(os.getppid())
            return [*(pid for pid in pids if pid != os.getpid()), os.getpid()]  # a stopped process cannot act
        return [next(process["pid"] for process in self._alive() if process["kind"] == victim)]

    def kill_node_of(self, kind: str) -> None:
        """End the one node that all processes of a kind are on, and everyone on it."""
        [node] = {process["node"] for process in self._alive() if process["kind"] == kind}
        for pid in self._everyone_on(node):
            os.kill(pid, signal.SIGKILL)

    def _everyone_on(self, node: int) -> list[int]:
        return [node, *(process["pid"] for process in self._alive() if process["node"] == node)]

    def _alive(self) -> list[dict]:
        return [process for process in self.processes() if is_alive(process["pid"])]


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def reach(call: str, kind: str) -> None:
    Folder(Path(os.environ["CHATLEARN_FAULTS"])).reach(call, kind)


def enrol(kind: str, number: int) -> None:
    Folder(Path(os.environ["CHATLEARN_FAULTS"])).enrol(kind, number)


class TrappedTrainer(FakeTrainer):
    """Is inside a call when half of it is done, where it has halves."""

    def setup(self) -> None:
        enrol("trainer", self.context.rank)
        reach("setup", "trainer")
        super().setup()

    def compute(self, batch, request):
        reach("compute", "trainer")
        return super().compute(batch, request)

    def update(self, batch, loss):
        metrics = super().update(batch, loss)
        reach("update", "trainer")  # the weights have changed, but no other process knows
        return metrics

    def weights(self, export="full_tensors", payload="full"):
        for number, shard in enumerate(super().weights(export, payload)):
            if number == 1:
                reach("send", "trainer")
            yield shard

    def save(self, directory: Path):
        facts = super().save(directory)
        reach("save", "trainer")  # written, not sealed
        return facts

    def load(self, directory: Path) -> None:
        reach("load", "trainer")
        super().load(directory)

    def export_model(self, directory: Path) -> None:
        super().export_model(directory)
        reach("export", "trainer")

    def close(self) -> None:
        reach("close", "trainer")
        super().close()


class TrappedLoader(FakeWeightLoader):
    """Is inside when the first tensors have been taken."""

    async def load_tensors(self, tensors) -> None:
        await super().load_tensors(tensors)
        reach("receive", "generator")


class TrappedGenerator(FakeGenerator):
    """Is inside when half of the tokens of a request are there."""

    def setup(self) -> None:
        enrol("generator", self.context.replica)
        reach("setup", "generator")
        super().setup()
        self._loader = TrappedLoader(self, self._loader.expected_manifest())
        self._served = set()

    async def abort(self, request_ids=None) -> None:
        await super().abort(request_ids)
        if self._running:
            reach("abort", "generator")

    def _append_token(self, run) -> int:
        reach("token", "generator")
        if len(run.tokens) == run.request.sampling.max_tokens // 2:
            reach("generate", "generator")
        if run.request.resume_from is not None:
            reach("resumed", "generator")
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for _, t in sorted(self._weights.items()))).hexdigest()
        if (self._version, digest) not in self._served:
            self._served.add((self._version, digest))
            Folder(Path(os.environ["CHATLEARN_FAULTS"])).note_weights(self._version, digest)
        return super()._append_token(run)

    def close(self) -> None:
        reach("close", "generator")
        super().close()


class TrappedReward(FakeReward):
    """The share of even tokens. Is inside when it has judged and not answered."""

    def setup(self) -> None:
        enrol("reward", self.context.replica)
        reach("setup", "reward")
        super().setup()

    async def score(self, samples):
        results = [RewardResult(float((s.token_ids[s.num_prompt_tokens :] % 2 == 0).mean())) for s in samples]
        reach("score", "reward")
        return results

    def close(self) -> None:
        reach("close", "reward")
        super().close()


class ConversationOptions(FakeOptions):
    """Of a conversation with a tool."""

    num_turns: int = 2
    seconds_per_rollout: float = 0.0
    """The tool takes as many times this as the worker has begun rollouts: it is slow for those that train later."""
    broken: str | None = None
    """Id of a rollout whose tool fails."""


class TrappedEnvironment:
    """Turns with a token between them. Is inside when the first has been sampled."""

    def __init__(self, options, context) -> None:
        self.options = options
        self.context = context
        self._num_rollouts = 0

    def setup(self) -> None:
        enrol("environment", self.context.replica)
        reach("setup", "environment")

    async def rollout(self, prompt, context):
        self._num_rollouts += 1
        seconds = self._num_rollouts * self.options.seconds_per_rollout
        sequence = context.sequence()
        sequence.sampled(await context.generate(sequence.token_ids))
        reach("rollout", "environment")
        for _ in range(1, self.options.num_turns):
            await asyncio.sleep(seconds)
            if context.id == self.options.broken:
                raise ValueError("the tool fails")
            sequence.observed(prompt.token_ids[:1])
            sequence.sampled(await context.generate(sequence.token_ids))
        return context.finished([sequence])

    def close(self) -> None:
        reach("close", "environment")
