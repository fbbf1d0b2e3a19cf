"""What tests across packages share: a tiny model, data, a plugin that interferes on demand, and processes.

``chatlearn(...)`` starts the command line in a process of its own, forked from a server that has everything imported.
The distribution ``probe`` is installed into a folder on PYTHONPATH as an installer would leave it. It registers rewards
good and bad, and trainer and generator ``watched``: first-party ones that send their process SIGKILL (or
``PROBE_SIGNAL``), or fail, at the point that the environment names (``PROBE=point:count``: the count-th time this
process gets there).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatlearn_testing.leftovers import WAIT_S, wait_until_empty
from chatlearn_testing.processes import session_members

PROBE_PACKAGE = Path(__file__).with_name("probe_package")
WHEEL = "probe_package-1.0-py3-none-any.whl"
PROBE_PLUGIN = """
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec, RewardSpec, TrainerSpec
from probe_points import meddle, reach

@hookimpl
def chatlearn_rewards():
    return [RewardSpec(name=name, factory=f"probe_backends:{name.title()}Reward", options="probe_options:Options")
            for name in ("letters", "raising", "hanging", "blocking", "nan", "miscounting", "moody")]

@hookimpl
def chatlearn_algorithms():
    from chatlearn_core.plugins.records import AlgorithmSpec
    roles = (("sampler", "generator"), ("judge", "reward"), ("helper", "trainer"), ("policy", "trainer"))
    return [AlgorithmSpec(name="renamed", factory="probe_backends:Renamed",
                          options="chatlearn_algorithms.grpo_options:GRPOOptions", roles=roles)]

@hookimpl
def chatlearn_environments():
    from chatlearn_core.plugins.records import EnvironmentSpec
    return [EnvironmentSpec(name="retry", factory="probe_backends:Retry", options="probe_options:Options")]

@hookimpl
def chatlearn_trainers():
    from chatlearn_fsdp.plugin import chatlearn_trainers
    from dataclasses import replace
    [record] = chatlearn_trainers()
    return [replace(record, name="watched", factory="probe_backends:WatchedTrainer")]

@hookimpl
def chatlearn_generators():
    from chatlearn_transformers.plugin import chatlearn_generators
    from dataclasses import replace
    [record] = chatlearn_generators()
    return [
        replace(record, name="watched", factory="probe_backends:WatchedGenerator"),
        replace(record, name="raw", factory="probe_backends:RawGenerator", bases=frozenset({"raw"}),
                kept_ids=False),
        replace(record, name="untrue", factory="probe_backends:RawGenerator", bases=frozenset({"processed"})),
    ]

@hookimpl
def chatlearn_run_start(run_dir, config):
    reach("start")
    meddle(config)

@hookimpl
def chatlearn_rollout_end(step, samples, metrics):
    reach("rollout")
    meddle(samples, metrics)

@hookimpl
def chatlearn_weights_synced(policy_version, receipts):
    reach("synced")
    meddle(receipts)

@hookimpl
def chatlearn_step_end(step, metrics):
    reach("metrics")
    meddle(metrics)

@hookimpl
def chatlearn_checkpoint_saved(step):
    reach("saved")

@hookimpl
def chatlearn_run_end(status, summary):
    reach(f"end {status}")
    meddle(summary)
"""

PROBE_POINTS = """
import collections, os, signal

_counts = collections.Counter()

def arrived(point):
    _counts[point] += 1
    wanted, _, count = os.environ.get("PROBE", "").partition(":")
    return wanted == point and _counts[point] == int(count or 1)

def meddle(*values):
    # Change whatever can be changed, and the random numbers of the process.
    if "PROBE_MEDDLE" not in os.environ:
        return
    import random, numpy, torch
    for value in values:
        _change(value)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)

def _change(value):
    if isinstance(value, (list, tuple)):
        for entry in value:
            _change(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            _change(entry)
        value.clear()
        value["made up"] = 1.0
    elif hasattr(value, "fill"):
        try:
            value.fill(0)
        except ValueError:  # read-only
            pass
    for name in getattr(value, "__dataclass_fields__", ()):
        _change(getattr(value, name))
        try:
            setattr(value, name, "made up")
        except AttributeError:  # frozen
            pass
    if isinstance(value, list):
        value.clear()

def reach(point):
    if arrived(point):
        os.kill(os.getpid(), int(os.environ.get("PROBE_SIGNAL", signal.SIGKILL)))
"""

PROBE_OPTIONS = """
from pydantic import BaseModel

class Options(BaseModel):
    pass
"""

PROBE_BACKENDS = """
import asyncio, os, time
from dataclasses import replace
from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import RoleUpdate
from chatlearn_core.types import RAW_BASIS, RewardResult
from dataclasses import replace
from chatlearn_algorithms.grpo import GRPO
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_transformers.generator import TransformersGenerator
from probe_points import _counts, arrived, reach

class Reward:
    def __init__(self, options, context): ...
    def setup(self): ...
    def health(self): return None
    def offload(self, parts): ...
    def onload(self, parts): ...
    def close(self): ...

class LettersReward(Reward):
    async def score(self, samples):
        return [self.judge(sample) for sample in samples]

    def judge(self, sample):
        text = sample.text
        return RewardResult(sum(letter in "aeiou" for letter in text) / max(1, len(text)))

class RaisingReward(Reward):
    async def score(self, samples):
        raise KeyError("answer")

class HangingReward(Reward):
    async def score(self, samples):
        await asyncio.Event().wait()

class BlockingReward(Reward):
    async def score(self, samples):
        print("the reward blocks", flush=True)
        time.sleep(600)

class NanReward(Reward):
    async def score(self, samples):
        return [RewardResult(float("nan")) for _ in samples]

class MiscountingReward(Reward):
    async def score(self, samples):
        return [RewardResult(1.0) for _ in samples][1:] + [RewardResult(1.0)] * 2

class MoodyReward(LettersReward):
    def judge(self, sample):
        index = int(sample.id.rpartition("#")[2])
        if index == 0:
            return RewardResult(float("nan"))
        return RewardResult(None, error="no answer in it") if index == 1 else super().judge(sample)

class Retry:
    # Two turns: the answer, a hint that the policy did not write, and a second answer.

    def __init__(self, options, context):
        self.options = options

    def setup(self): ...

    def close(self): ...

    async def rollout(self, prompt, context):
        if arrived("environment raises"):
            raise ValueError("no such tool")
        if arrived("environment hangs"):
            await asyncio.sleep(600)
        if arrived("environment dies") and not os.path.exists(os.environ["PROBE_MARKER"]):
            open(os.environ["PROBE_MARKER"], "w").write(str(os.getpid()))
            os.kill(os.getpid(), 9)
        sequence = context.sequence()
        for turn in range(2):
            if turn:
                sequence.observed(context.tokenizer.encode(" wrong, try again:"))
            sequence.sampled(await context.generate(sequence.token_ids))
        first, second = (turn.text for turn in sequence.sample.turns)
        return context.finished([sequence], reward=RewardResult(float(sum(map(str.isalpha, first + second)))))

class Renamed(GRPO):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.policy = "policy"

    def flow(self, prompts, m):
        samples = m.sampler.generate(prompts)
        return m.join(samples, m.judge.score(samples), m.policy.logprobs(samples))

    def updates(self, step):
        loss = self.loss()
        return [RoleUpdate("helper", replace(loss, old_logprobs="generator_logprobs")),
                RoleUpdate("policy", replace(loss, old_logprobs="policy_logprobs"))]

class WatchedTrainer(FSDPTrainer):
    def update(self, batch, loss):
        reach("update begins")
        if arrived("hang"):
            time.sleep(600)
        if arrived("out of memory"):
            raise RuntimeError("out of memory")
        metrics = super().update(batch, loss)
        reach("update")
        return metrics

    def save(self, directory):
        facts = super().save(directory)
        reach("save")
        if arrived("half a save"):
            file = directory / "optimizer.pt"
            with file.open("r+b") as stream:
                stream.truncate(file.stat().st_size // 2)
            os.kill(os.getpid(), 9)
        return facts

    def finish_save(self):
        if arrived("write beside"):  # while the next step trains
            updates = _counts["update"]
            while _counts["update"] == updates:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        return super().finish_save()

    def export_model(self, directory):
        super().export_model(directory)
        if arrived("export"):
            (directory / "config.json").unlink()
            os.kill(os.getpid(), 9)

class WatchedGenerator(TransformersGenerator):
    deaths = 0

    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        reach("completion")
        limit = int(os.environ.get("PROBE_DEATHS", "0"))
        if WatchedGenerator.deaths < limit and arrived("engine"):
            WatchedGenerator.deaths += 1
            await self.die("the engine process was killed")
            raise BackendError("the engine process was killed")
        if WatchedGenerator.deaths < limit and limit > 1 and WatchedGenerator.deaths:
            WatchedGenerator.deaths += 1
            await self.die("the engine process was killed again")
            raise BackendError("the engine process was killed again")
        return completion

class RawGenerator(TransformersGenerator):
    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        return replace(completion, basis=RAW_BASIS, logprobs=completion.raw_logprobs)
"""


@dataclass
class Finished:
    """A process that has ended."""

    code: int
    """Exit status; -9 for SIGKILL."""
    output: str
    """stdout and stderr."""
    pid: int


@dataclass
class Started:
    """A process that runs."""

    pid: int
    output: Path
    server: RunServer

    def wait(self) -> Finished:
        """Wait for its end, and see that no process of its session lives on."""
        code = self.server.ask({"wait": self.pid})["code"]
        # A process whose parent got SIGKILL needs a moment to notice; a normal end of a run ends its processes first.
        left = wait_until_empty(lambda: session_members(self.pid), WAIT_S if code == -signal.SIGKILL else 0.0)
        assert not left, f"left behind: {left}"
        return Finished(code, self.output.read_text(errors="replace"), self.pid)

    def wait_for(self, text: str) -> None:
        """Wait until the output holds ``text``."""
        while text not in (self.output.read_text(errors="replace") if self.output.exists() else ""):
            if not Path(f"/proc/{self.pid}/cmdline").read_bytes():
                raise AssertionError(f"ended before it said {text!r}:\n{self.output.read_text(errors='replace')}")
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)


@dataclass
class RunServer:
    """The forking server and the folder it writes outputs to."""

    process: subprocess.Popen[str]
    folder: Path
    count: int = 0

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def start(self, *argv: str, cwd: Path, file_limit: int | None = None, **env: str) -> Started:
        self.count += 1
        output = self.folder / f"{self.count}.txt"
        order = {"argv": argv, "env": env, "cwd": str(cwd), "output": str(output), "file_limit": file_limit}
        return Started(self.ask(order)["pid"], output, self)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that plays site-packages, with the distribution ``probe`` in it."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "probe-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    info.joinpath("RECORD").write_text("")
    info.joinpath("entry_points.txt").write_text("[chatlearn]\nprobe = probe_plugin\n")
    sources = {"plugin": PROBE_PLUGIN, "points": PROBE_POINTS, "options": PROBE_OPTIONS, "backends": PROBE_BACKENDS}
    for name, source in sources.items():
        folder.joinpath(f"probe_{name}.py").write_text(textwrap.dedent(source))
    return folder


@pytest.fixture(scope="session")
def probe_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of ``tests/probe_package`` is installed, and nothing else."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("probe-package")
    pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index", "--target", folder]
    for command in (["hatchling", "build", "-t", "wheel", "-d", wheels], [*pip, wheels / WHEEL]):
        subprocess.run([sys.executable, "-m", *map(str, command)], cwd=PROBE_PACKAGE, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def environment(site: Path) -> dict[str, str]:
    """Environment variables of every process that a test starts."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("CHATLEARN_", "PROBE"))}
    return variables | {
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "400",
    }


@pytest.fixture(scope="session")
def run_server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunServer]:
    """The server that processes are forked from."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("run_server.py"))],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"ready": True}
    yield RunServer(process, tmp_path_factory.mktemp("output"))
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


@pytest.fixture
def start(run_server: RunServer, tmp_path: Path, leaves_nothing: object) -> Callable[..., Started]:
    """``start(*argv, **environment)``: the command line, in the background. Nothing of it may be left at the end."""
    return lambda *argv, **settings: run_server.start(*map(str, argv), cwd=tmp_path, **settings)


@pytest.fixture
def chatlearn(start: Callable[..., Started]) -> Callable[..., Finished]:
    """``chatlearn(*argv, **environment)``: the command line, to its end."""
    return lambda *argv, **settings: start(*argv, **settings).wait()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 2 layers."""
    import torch

    from chatlearn_hf.tiny import build_tiny_model

    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, intermediate=64)


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 questions, one a line."""
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"prompt": f"what is {i} plus {i + 1}?", "answer": str(2 * i + 1)} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@dataclass
class Recipe:
    """A configuration and where it is written."""

    file: Path
    content: dict[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.file.parent / "run"

    def write(self) -> Path:
        self.file.write_text(yaml.safe_dump(self.content, sort_keys=False))
        return self.file


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path, sums: Path) -> Recipe:
    """GRPO with several mini-batches and epochs, small enough for a second."""
    content = {
        "name": "test",
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(tiny_model)},
        "data": {"train": [{"path": str(sums), "format": "prompt"}]},
        "algorithm": {"name": "grpo", "options": {"group_size": 3, "kl_coef": 0.01}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "watched", "options": {"learning_rate": 0.003}},
            "reference": {"kind": "trainer", "backend": "fsdp"},
            "generator": {"kind": "generator", "backend": "watched"},
            "reward": {"kind": "reward", "backend": "letters"},
        },
        "sampling": {"max_tokens": 8},
        "train": {"steps": 4, "prompts_per_step": 4, "mini_batches": 2, "epochs": 2},
        "checkpoint": {"every": 1},
        "runtime": {"options": {"num_threads": 1}},
    }
    recipe = Recipe(tmp_path / "run.yaml", content)
    recipe.write()
    return recipe


TIMED = ("timing_s/", "perf/throughput", "perf/replica_idle", "sync/slowest_replica_s")
"""Metrics that are measured with a clock."""


@dataclass(frozen=True)
class Result:
    """What a run leaves that must not depend on how it came about."""

    model: bytes
    metrics: list[dict[str, Any]]
    rollouts: dict[str, str]
    totals: dict[str, float]


@pytest.fixture
def result_of() -> Callable[[Path], Result]:
    """Reads the result of a run directory, without times."""

    def read(run_dir: Path) -> Result:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        untimed = [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]
        return Result(
            (run_dir / "model" / "model.safetensors").read_bytes(),
            untimed,
            {file.name: file.read_text() for file in sorted((run_dir / "rollouts").iterdir())},
            json.loads((run_dir / "summary.json").read_text())["totals"],
        )

    return read
