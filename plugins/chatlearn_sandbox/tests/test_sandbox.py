"""The sandbox against programs that mean harm: what they reach, what they may use, and what they leave."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from chatlearn_sandbox.process_tree import descendants
from chatlearn_sandbox.sandbox import Limits, Sandbox, SandboxError, run

LIMITS = Limits(wall_s=20, memory_bytes=256 << 20, max_processes=8, disk_bytes=1 << 20, file_bytes=1 << 20)


@pytest.fixture(scope="module")
def sandbox():
    sandbox = Sandbox(LIMITS)
    try:
        sandbox.check()
    except SandboxError as error:
        pytest.skip(f"this machine makes no namespaces: {error}")
    return sandbox


@pytest.fixture(autouse=True)
def _leaves_nothing():
    before = descendants(os.getpid())
    descriptors = {path.name for path in Path("/proc/self/fd").iterdir()}
    yield
    assert descendants(os.getpid()) <= before
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == descriptors


def judge(sandbox, source, **settings):
    command = [sandbox.python, "-s", "-S", "main.py"]
    with sandbox.start(command, files={"main.py": source}, **settings) as process:
        return run(process)[0]


def test_a_program_reads_its_input_and_ends(sandbox):
    result = judge(sandbox, "import sys; sys.stdout.write(sys.stdin.read() * 2); sys.exit(3)", stdin=b"a" * 300_000)
    assert (result.ended, result.code, result.output) == ("exited", 3, b"a" * 600_000)
    assert result.peak_memory_bytes > 1 << 20


def test_one_that_reads_nothing_is_not_waited_for(sandbox):
    assert judge(sandbox, "print(1)", stdin=b"a" * 300_000).output == b"1\n"


def test_what_it_sees(sandbox, monkeypatch, tmp_path):
    """No variable, file or process of the one that started it; nothing that it can write but ``/tmp``."""
    monkeypatch.setenv("SECRET_TOKEN", "12345")
    (tmp_path / "secret").write_text("12345")
    source = f"""
import ctypes, os, socket
def attempt(name, work):
    try:
        print(name, "done", work())
    except Exception as error:
        print(name, type(error).__name__)
print(sorted(os.environ), os.getuid(), os.getpid() < 9)
attempt("read", lambda: open({str(tmp_path / "secret")!r}).read())
attempt("list", lambda: os.listdir("/proc"))
for place in ("/", "/usr", "/dev", {str(Path(os.__file__).resolve().parent)!r}, {str(tmp_path)!r}):
    attempt("write", lambda: open(place + "/sandbox-was-here", "w"))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", 22), timeout=1))
attempt("resolve", lambda: socket.create_connection(("192.0.2.1", 80), timeout=1))
try:
    os.kill(os.getppid(), 9)  # its own init, which the kernel protects
except PermissionError:
    pass
attempt("kill other", lambda: os.kill({os.getpid()}, 9))
attempt("root", lambda: os.setuid(0))
libc = ctypes.CDLL(None)
print("unshare", libc.unshare(0x10000000), "mount", libc.mount(b"x", b"/usr", b"tmpfs", 0, None))
for number in range(3, 64):
    try:
        print("descriptor", number, os.fstat(number))
    except OSError:
        pass
open("mine", "w").write("mine")
print(sorted(os.listdir(".")))
"""
    result = judge(sandbox, source)
    assert result.errors == b""
    assert result.output.decode().splitlines() == [
        "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'PYTHONDONTWRITEBYTECODE', "
        "'PYTHONHASHSEED', 'TMPDIR'] 1000 True",
        "read FileNotFoundError",
        "list FileNotFoundError",
        *["write OSError"] * 4,
        "write FileNotFoundError",
        "connect OSError",
        "resolve OSError",
        "kill other ProcessLookupError",
        "root PermissionError",
        "unshare -1 mount -1",
        "['main.py', 'mine']",
    ]
    assert not (tmp_path / "sandbox-was-here").exists()


def test_processes_that_stay_behind_end_with_it(sandbox):
    source = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("done")
sys.stdout.flush()
os._exit(0)
"""
    begin = time.monotonic()
    result = judge(sandbox, source)
    assert (result.ended, result.output) == ("exited", b"done\n")
    assert time.monotonic() - begin < LIMITS.wall_s  # the orphan held its standard output


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nwhile True: os.fork()", b"BlockingIOError"),
        ("a = bytearray(1 << 30)", b"MemoryError"),
        ("a = []\nwhile True: a.append(bytes(1 << 20))", b"MemoryError"),
        ("open('a', 'wb').write(bytes(4 << 20))", b"OSError"),
        ("for i in range(99): open(str(i), 'wb').write(bytes(1 << 18))", b"No space left on device"),
        ("a = [open('/dev/null') for _ in range(99)]", b"Too many open files"),
        (
            "import threading as t, time\n"
            "for _ in range(99): t.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            b"thread",
        ),
    ],
)
def test_what_it_may_not_use_up(sandbox, source, said):
    limits = Limits(wall_s=6, memory_bytes=256 << 20, max_processes=8, disk_bytes=1 << 20, file_bytes=1 << 20)
    result = judge(Sandbox(limits), source)
    assert result.code != 0
    assert said in result.errors


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("while True: pass", "timed_out"),
        ("import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
         "    except (OSError, ValueError): pass\ntime.sleep(600)", "timed_out"),
        ("import os, time\nos.close(0); os.close(1); os.close(2); time.sleep(600)", "timed_out"),
        ("import os\nwhile True: os.write(1, bytes(1 << 16))", "too_much_output"),
        ("import os\nwhile True: os.write(2, bytes(1 << 16))", "timed_out"),
    ],
)  # fmt: skip
def test_one_that_does_not_end_is_ended(source, ended, sandbox):
    result = judge(Sandbox(Limits(wall_s=0.4)), source)
    assert (result.ended, result.code) == (ended, None)
    assert len(result.output) <= Limits().output_bytes
    assert len(result.errors) <= 64 << 10


SEVERAL = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        os.setsid()
        mine = bytearray(os.urandom(1 << 20)) * 60
        time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize("isolation", ["namespaces", "none"])
def test_several_processes_may_not_fill_the_memory(sandbox, isolation):
    """Each of seven has far less than a process may; together they have 360 MiB."""
    limits = Limits(wall_s=20, memory_bytes=256 << 20, max_processes=8, total_memory_bytes=128 << 20)
    result = judge(Sandbox(limits, isolation=isolation), SEVERAL)
    assert (result.ended, result.code) == ("out_of_memory", None)


def test_files_without_a_name_are_memory(sandbox):
    """Forty of 8 MiB, none of them mapped: no limit of a process or of the disk sees them."""
    source = """
import os, time
files = [os.memfd_create("x") for _ in range(40)]
for file in files:
    for _ in range(8):
        os.write(file, bytes(1 << 20))
time.sleep(600)
"""
    result = judge(Sandbox(Limits(wall_s=20, memory_bytes=256 << 20)), source)
    assert result.ended == "out_of_memory", result


@pytest.mark.skipif(os.geteuid() != 0, reason="older kernels let only root limit the shared memory of a namespace")
def test_there_is_no_shared_memory_that_outlives_its_process(sandbox):
    source = "import ctypes; print(ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600))"
    assert judge(sandbox, source).output == b"-1\n"


def test_memory_that_processes_share_counts_once(sandbox):
    """Six children of a process with 100 MiB that write nothing: 700 MiB would be over the limit of 256."""
    source = """
import os, time
mine = bytearray(os.urandom(1 << 20)) * 100
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
time.sleep(0.5)
print("done")
"""
    result = judge(sandbox, source)
    assert (result.ended, result.code, result.output) == ("exited", 0, b"done\n")


def test_cpu_time_of_several_processes_is_limited_each(sandbox):
    result = judge(Sandbox(Limits(wall_s=20, cpu_s=1)), "while True: pass")
    assert (result.ended, result.code) == ("exited", -24)  # SIGXCPU


def test_it_ends_when_the_caller_does(sandbox):
    """Killed outright, the caller can tell nothing to anybody."""
    reader, writer = os.pipe()
    caller = os.fork()
    if caller == 0:
        _process = sandbox.start([sandbox.python, "-S", "-c", "import time; time.sleep(600)"])
        while len(found := descendants(os.getpid())) < 3:
            time.sleep(0.01)
        os.write(writer, " ".join(map(str, found)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    with os.fdopen(reader) as told:
        inside = [int(process) for process in told.read().split()]
    os.waitpid(caller, 0)
    assert len(inside) >= 3
    deadline = time.monotonic() + 30
    while any(map(_alive, inside)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_alive, inside))


def _alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_sandbox_that_cannot_be_built_says_so(sandbox):
    broken = Sandbox(Limits(memory_bytes=1 << 10))
    with pytest.raises(SandboxError, match="an empty program did not run in the sandbox"):
        broken.check()


def test_without_namespaces_it_has_limits_and_ends_with_all_that_it_started():
    sandbox = Sandbox(Limits(wall_s=5, memory_bytes=256 << 20), isolation="none")
    sandbox.check()
    source = "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(600)\nprint(os.getcwd())\nbytearray(1 << 30)"
    result = judge(sandbox, source)
    assert result.errors.endswith(b"MemoryError\n")
    assert not Path(result.output.decode().strip()).exists()
