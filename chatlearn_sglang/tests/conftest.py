from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from chatlearn_core.exceptions import HostedProcessLostError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import Completion, GenerateRequest, GroupRendezvous
from chatlearn_hf.plain_forward import load_plain_model
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hosting import HostedProcess, SharedBlock
from chatlearn_hosting.engine_side.checksums import checksum
from chatlearn_hosting.engine_side.groups import SenderGroup
from chatlearn_hosting.process_group import live_members
from chatlearn_sglang.conformance import PYTHON_VARIABLE
from chatlearn_sglang.generator import SGLangGenerator
from chatlearn_sglang.options import LoraOptions, SGLangGeneratorOptions
from chatlearn_testing.model_directory import manifest_of, read_checkpoint
from chatlearn_testing.suites.generator_fixtures import PROMPTS, ask, assert_completion, plain_greedy

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[2]
os.environ.setdefault(PYTHON_VARIABLE, str(REPOSITORY / ".venv-sglang" / "bin" / "python"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that holds SGLang: named by the environment, or the one that ``make install-engines`` builds."""
    python = os.environ[PYTHON_VARIABLE]
    if not Path(python).is_file():
        pytest.skip(f"no interpreter with SGLang at {python}: run `make install-engines` or set {PYTHON_VARIABLE}")
    return python


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``model_dir(family, **config)``: a tiny random model, weights large enough that greedy text does not repeat."""
    built: dict[tuple[Any, ...], Path] = {}

    def build(family: str = "qwen3", **config: Any) -> Path:
        key = (family, *sorted(config.items()))
        if key not in built:
            config = {"initializer_range": 0.2, "max_length": 128} | config
            built[key] = build_tiny_model(tmp_path_factory.mktemp(family), family, **config)
        return built[key]

    return build


class LeasedProcess:
    """Stands in for ``HostedProcess`` where many replicas come and go: equal ones share a real engine.

    An engine takes half a minute to start. Each test gets it as it would be after a start: nothing running,
    the model directory's weights, under the version that this replica served last. Closing ends the lease alone.
    """

    engines: ClassVar[dict[str, tuple[HostedProcess, list[LeasedProcess]]]] = {}
    """By what they were started with: the engine, and a list that holds who used it last."""
    numbers: ClassVar[Iterator[int]] = itertools.count(100)

    def __init__(self, name: str, *, arguments: Mapping[str, Any], **rest: Any) -> None:
        self._key = json.dumps([arguments, rest], sort_keys=True)
        self._make = lambda: HostedProcess(name, arguments=arguments, **rest)
        self._model = Path(arguments["owned"]["model_path"])
        self._version = 0
        self._closed: str | None = None
        self._number = next(self.numbers)
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()

    @property
    def lost(self) -> str | None:
        return self._closed or self.engines[self._key][0].lost

    def start(self, timeout_s: float) -> None:
        if self._key not in self.engines or self.engines[self._key][0].lost:
            process = self._make()
            process.start(timeout_s)
            self.engines[self._key] = (process, [self])
        self._take()

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self._check(method)
        return self._take().call(method, *args, timeout_s=timeout_s)

    async def acall(self, method: str, *args: Any, **rest: Any) -> Any:
        self._check(method)
        task = asyncio.ensure_future(self._take().acall(method, *self._with_own_names(method, args), **rest))
        entry = (asyncio.get_running_loop(), task)
        self._waiting.add(entry)
        try:
            result = await task
        except asyncio.CancelledError:
            self._check(method)
            raise
        finally:
            self._waiting.discard(entry)
        if method == "finish_weights":
            self._version = args[0]
        return result

    def _with_own_names(self, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """SGLang may not have let go yet of requests that the replica before it left, under the same numbers."""
        if method == "generate":
            return (f"{self._number}{args[0]}", *args[1:])
        return ([f"{self._number}{name}" for name in args[0]],) if method == "abort" else args

    def close(self, grace_s: float = 0.0) -> None:
        self._closed = self._closed or "it was closed"
        for loop, task in list(self._waiting):
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

    @classmethod
    def close_all(cls) -> None:
        for process, _ in cls.engines.values():
            process.close()
        cls.engines.clear()

    def _check(self, method: str) -> None:
        if self._closed:
            raise HostedProcessLostError(f"{method} failed: {self._closed}")

    def _take(self) -> HostedProcess:
        process, user = self.engines[self._key]
        if user[0] is not self:
            user[0] = self
            names = list(safe_open(self._model / "model.safetensors", framework="pt").keys())
            files = [(str(self._model / "model.safetensors"), [(name, name) for name in names])]
            process.call("abort", None, timeout_s=60)
            process.call("begin_weights", timeout_s=60)
            of_sync = {"sync": self._version, "adapter": False, "copies": {}}
            process.call("load", "checkpoint", {"files": files, **of_sync}, timeout_s=60)
            process.call("load", "finish", of_sync, timeout_s=60)
            process.call("finish_weights", self._version, False, timeout_s=60)
        return process


@pytest.fixture(scope="session")
def leased_engines() -> Iterator[type[LeasedProcess]]:
    """Engines that outlive their replicas, closed at the end."""
    yield LeasedProcess
    LeasedProcess.close_all()


@pytest.fixture(scope="module")
def share_engines(leased_engines: type[LeasedProcess]) -> Iterator[None]:
    """Let the replicas of this module share engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatlearn_sglang.generator.HostedProcess", leased_engines)
        yield


class Engine:
    """A generator with a real engine of its own, and an event loop to drive it."""

    def __init__(
        self, directory: Path, python: str, lora: LoraOptions | None = None, device: str = "cpu", **engine: Any
    ) -> None:
        source = ModelSource(str(directory), str(directory), max_length=128)
        options = SGLangGeneratorOptions(python=python, dtype="float32", bucket_mb=1, lora=lora)
        self.directory = directory
        self.generator = SGLangGenerator(options, RoleContext("actor", source, device=device, engine_arguments=engine))
        self.runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 120))

    def ask(self, *requests: GenerateRequest) -> list[Completion]:
        async def together() -> list[Completion]:
            return list(await asyncio.gather(*map(self.generator.generate, requests)))

        return self.run(together())

    def sync(self, channel: str, directory: Path) -> int:
        """Load a directory's weights, under the next version."""
        tensors = read_checkpoint(directory)
        loader, version = self.generator.loader, self.generator.policy_version + 1

        async def load() -> int:
            await loader.begin(version, manifest_of(tensors, loader.expected_manifest().aliases))
            await getattr(self, f"_by_{channel}")(directory, tensors)
            return await loader.finish()

        return self.run(load())

    async def _by_tensors(self, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        await self.generator.loader.load_tensors(tensors.items())

    async def _by_checkpoint(self, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        await self.generator.loader.load_checkpoint(directory)

    async def _by_memory_handles(self, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        with SharedBlock(100_000) as block:
            for handle in block.fill(tensors.items()):
                await self.generator.loader.load_handles(handle)

    async def _by_process_group(self, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        loader = self.generator.loader
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = loader.num_group_ranks
        rendezvous = GroupRendezvous("weights", f"127.0.0.1:{store.port}", "gloo", 1 + ranks, 1, 60.0)
        joining = asyncio.ensure_future(loader.join_group(rendezvous))
        sender = await asyncio.to_thread(SenderGroup, store, "weights", "gloo", 1 + ranks, 0, 60.0)
        await joining
        try:
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
            specs = list(manifest_of(tensors).tensors.values())
            sums = [checksum(tensor) for tensor in tensors.values()]
            receiving = asyncio.ensure_future(loader.load_broadcast("weights", specs, sums))
            await asyncio.to_thread(sender.broadcast(flat).wait)
            await receiving
        finally:
            await loader.leave_group("weights")
            sender.close()

    def processes(self) -> dict[str, int]:
        """The engine's processes by the titles that SGLang gives them."""
        found = {}
        for pid in live_members(self.generator._process.pid):
            title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            found[title] = pid
        return found

    def close(self) -> None:
        self.generator.close()
        self.runner.close()


@pytest.fixture(scope="module")
def start_engine(sglang_python: str) -> Iterator[Callable[..., Engine]]:
    """``start_engine(directory, lora=None, device="cpu", **engine_arguments)``: set up, closed at the module's end."""
    started: list[Engine] = []

    def start(directory: Path, lora: LoraOptions | None = None, device: str = "cpu", **engine: Any) -> Engine:
        started.append(Engine(directory, sglang_python, lora, device, **engine))
        started[-1].generator.setup()
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture(scope="session")
def assert_serves() -> Callable[[Engine, Path], None]:
    """``assert_serves(engine, directory)``: greedy output and its logprobs are a plain forward's with these weights."""

    def check(engine: Engine, directory: Path) -> None:
        reference = load_plain_model(directory)
        requests = [ask(f"check-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        for request, completion in zip(requests, engine.ask(*requests), strict=True):
            assert completion.token_ids.tolist() == plain_greedy(reference, request.prompt_ids.tolist())
            assert_completion(reference, request, completion, engine.generator.policy_version)

    return check
