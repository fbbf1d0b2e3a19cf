"""What the tests of hosting run in a child: copied into a package of its own, so it imports nothing of this folder."""

import asyncio
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .neighbour import NAME


class Target:
    def __init__(self, fault=None, greeting="hello"):
        self.greeting = greeting
        self.cancelled = []
        self._released = asyncio.Event()
        if fault == "raise":
            raise ValueError("no such model")
        if fault == "exit":
            print("fatal: the engine gives up", flush=True)
            os._exit(3)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "sleep":
            time.sleep(60)

    def echo(self, *args, **kwargs):
        return (args, kwargs)

    def greet(self):
        return f"{self.greeting} from {NAME}"

    def interpreter(self):
        return sys.executable, sys.path, sorted(name for name in sys.modules if name.startswith("chatlearn"))

    def fail(self, text):
        raise KeyError(text)

    def bad_answer(self):
        return object()

    def block(self, seconds):
        time.sleep(seconds)

    def compute(self, count):
        """In C code that keeps the interpreter's lock."""
        return sum(range(count))

    def hang(self, seconds):
        """The same, and no CPU is used."""
        ctypes.PyDLL(None).sleep(seconds)

    def start_helper(self):
        return subprocess.Popen(["sleep", "60"]).pid

    def noise(self, text, count=1):
        print("\n".join([text] * count), flush=True)

    def environment(self, name):
        return os.environ.get(name)

    async def wait(self, name):
        try:
            await self._released.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return name

    def release(self):
        self._released.set()
        return self.cancelled

    async def count(self, upto, emit):
        for value in range(upto):
            emit(value)
            if value % 7 == 0:
                await asyncio.sleep(0)
        return upto

    def spawn(self, deaf=False, group=False):
        """A grandchild that ignores SIGTERM if ``deaf``, in a group of its own if ``group``."""
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if deaf else ""
        code = f"import signal, time; {ignore} print('ready', flush=True); time.sleep(600)"
        process_group = 0 if group else None
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=process_group)
        child.stdout.readline()
        return child.pid

    def spawn_by_multiprocessing(self):
        """A module of this package must be importable in a process that multiprocessing spawns."""
        import multiprocessing

        from .neighbour import double

        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.map(double, [4]) + pool.map(os.getenv, ["HOSTED_SPAWNED"])

    def map_files(self):
        """Two files in shared memory, and a semaphore."""
        import multiprocessing

        self.semaphore = multiprocessing.get_context("spawn").Semaphore()
        self.mapped = []
        names = []
        for _ in range(2):
            descriptor, name = tempfile.mkstemp(prefix="hosted-test-", dir="/dev/shm")
            os.write(descriptor, b"x")
            self.mapped.append(mmap.mmap(descriptor, 1))
            os.close(descriptor)
            names.append(name)
        return [*names, f"/dev/shm/sem.{self.semaphore._semlock.name.removeprefix('/')}"]

    def die(self, how):
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)

    def hang_up(self):
        """Stay alive with a closed connection."""
        os.closerange(3, max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 1)
        time.sleep(60)

    def sum_block(self, content):
        from chatlearn_hosting.engine_side.blocks import MappedBlock

        with MappedBlock(content) as block:
            return {name: float(tensor.double().sum()) for name, tensor in block.tensors()}

    def keep_view(self, content):
        from chatlearn_hosting.engine_side.blocks import MappedBlock

        with MappedBlock(content) as block:
            self.kept = dict(block.tensors())

    def mapped_blocks(self):
        return Path("/proc/self/maps").read_text().count("chatlearn-block")


class Polite(Target):
    def __init__(self, path):
        super().__init__()
        self._path = path

    async def close(self):
        Path(self._path).write_text("closed")


def map_and_die(seconds):
    target = Target()  # keeps what it maps
    print("mapped", target.map_files()[0], flush=True)
    time.sleep(seconds)
    os._exit(5)


async def build_slowly(greeting):
    await asyncio.sleep(0)
    return Target(greeting=greeting)
