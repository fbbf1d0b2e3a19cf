"""Builds the sandbox from inside: creates the namespaces, starts and watches the program. A script.

It imports only the standard library.

There are three processes. The first one (launcher) creates the namespaces; the second one (init, process 1 of the
process namespace) builds the file system; the third one gives up all rights, sets its limits and becomes the program.
The kernel kills everything in the process namespace once init ends, and init ends with the launcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing is slow
    from collections.abc import Callable
    from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 1 << 18
MNT_DETACH = 2
PIVOT_ROOT, MOUNT_SETATTR = (41, 442) if os.uname().machine == "aarch64" else (155, 442)
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36

USER = 1000
"""User id of the program inside the sandbox."""
NOBODY = 65534
"""User id of the program outside if root starts it, because the kernel does not limit root's processes."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""Directories that programs need; readable if they exist."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WORK = "/tmp"
"""The program's working directory inside the sandbox."""
MOUNT_POINTS = ("/mnt", "/srv", "/media", "/home", "/tmp")
"""Candidates for the temporary mount point of the new root; it must not contain a path that the sandbox shows."""
MAX_FILES = 4096
EXTRA_DESCRIPTOR = 3

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """``sandbox_entry.py SPECIFICATION STATUS CONTROL [EXTRA]``: descriptors of three pipes, and of the program."""
    specification, status, control, *extra = map(int, sys.argv[1:])
    with open(specification, "rb") as stream:
        spec = json.load(stream)
    for descriptor in (status, control, *extra):
        os.set_inheritable(descriptor, False)
    try:
        if spec["namespaces"]:
            _enter_namespaces()
            init = os.fork()
            if init == 0:
                _die_with_parent()
                _guarded(status, lambda: _build_file_system(spec))
                _report(status, _watch(_start(spec, status, extra), control))
                os._exit(0)
            os.close(status)
            os.waitpid(init, 0)
        else:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            report = _watch(_start(spec, status, extra), control)
            _end_descendants(spec["process_tree"])
            _report(status, report)
    except OSError as error:
        _report(status, {"failed": str(error)})
    os._exit(0)


def _enter_namespaces() -> None:
    """Create the namespaces. A helper process outside maps the users, because only there may another user be mapped."""
    made_reader, made_writer = os.pipe()
    launcher, user, group = os.getpid(), os.geteuid(), os.getegid()
    helper = os.fork()
    if helper == 0:
        os.close(made_writer)
        made = os.read(made_reader, 1)
        os._exit(_map_users(launcher, user, group) if made else 0)
    os.close(made_reader)
    try:
        _check(_libc.unshare(NAMESPACES), "the kernel refuses new namespaces (unshare)")
        os.write(made_writer, b"1")
    finally:
        os.close(made_writer)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code != 0:
        raise OSError(code, f"the kernel refuses to map users into the namespace: {os.strerror(abs(code))}")


def _map_users(process: int, user: int, group: int) -> int:
    """Map the program's user. Return 0 or an error number."""
    maps = [(f"{USER} {user} 1", f"{USER} {group} 1")]
    if user == 0:
        maps.insert(0, (f"0 0 1\n{USER} {NOBODY} 1", f"0 0 1\n{USER} {NOBODY} 1"))
    failed = 0
    for users, groups in maps:
        try:
            _write(f"/proc/{process}/setgroups", "deny")
            _write(f"/proc/{process}/gid_map", groups)
            _write(f"/proc/{process}/uid_map", users)
            return 0
        except OSError as error:
            failed = error.errno or 1
    return failed


def _build_file_system(spec: dict[str, Any]) -> None:
    """Build a root with only the system's programs and libraries, read-only, and an empty ``/tmp``."""
    # A nested user namespace would have the rights that this one gives up.
    with suppress(OSError):  # /proc/sys may be read-only; even a nested namespace cannot undo a read-only mount
        _write("/proc/sys/user/max_user_namespaces", "0")
    with suppress(OSError):  # older kernels let only root do this
        _write("/proc/sys/kernel/shmall", "0")  # memory of this namespace that no process need map
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    readable = spec["readable"]
    root = next(p for p in MOUNT_POINTS if os.path.isdir(p) and not any(r.startswith(f"{p}/") for r in readable))
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    for path in (*SYSTEM, *DEVICES, *readable):
        _show(path, root)
    os.makedirs(root + WORK, exist_ok=True)
    os.makedirs(root + "/.old")
    os.chdir(root)
    _check(_libc.syscall(PIVOT_ROOT, b".", b".old"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/.old", MNT_DETACH), "umount of the old root")
    os.rmdir("/.old")
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes))
    _check(result, "read-only mounts (mount_setattr, Linux 5.12 or later)")
    options = f"mode=0700,uid={USER},gid={USER},size={spec['disk_bytes']},nr_inodes={MAX_FILES}"
    _mount("tmpfs", WORK, "tmpfs", MS_NOSUID | MS_NODEV, options)
    _check(_libc.sethostname(b"sandbox", 7), "sethostname")


def _show(path: str, root: str) -> None:
    """Make a path readable under the same name in the new root."""
    target = root + path
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(path, target, None, MS_BIND | MS_REC)


def _start(spec: dict[str, Any], status: int, extra: list[int]) -> int:
    """Start the program and return its process id."""
    _report(status, {"started": True})
    program = os.fork()
    if program:
        for descriptor in (0, 1, 2, *extra):
            os.close(descriptor)
        return program
    _guarded(status, lambda: _become(spec, extra))
    raise AssertionError("exec does not return")


def _become(spec: dict[str, Any], extra: list[int]) -> None:
    os.setpgid(0, 0)
    if spec["namespaces"]:
        most = spec["max_processes"]
        if os.geteuid() != USER:
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
        else:
            most += 2  # launcher and init belong to the same user
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    os.umask(0o077)
    os.chdir(spec["directory"])
    for name, text in spec["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    for descriptor in extra:
        os.dup2(descriptor, EXTRA_DESCRIPTOR)
        os.set_inheritable(EXTRA_DESCRIPTOR, True)  # dup2 does nothing if both are equal
    kept = EXTRA_DESCRIPTOR + 1 if extra else EXTRA_DESCRIPTOR
    for name, value in {
        "AS": spec["memory_bytes"],
        "DATA": spec["memory_bytes"],
        "CPU": spec["cpu_s"],
        "FSIZE": spec["file_bytes"],
        "NOFILE": spec["max_open_files"],
        "CORE": 0,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
    }.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        beyond = limit + 1 if name == "CPU" and hard in (resource.RLIM_INFINITY, max(hard, limit + 1)) else limit
        resource.setrlimit(kind, (limit, beyond))  # at the first limit of CPU time SIGXCPU, at the second SIGKILL
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in range(kept, spec["max_open_files"]):
        with suppress(OSError):
            os.set_inheritable(descriptor, False)
    os.execve(spec["argv"][0], spec["argv"], spec["environment"])


def _watch(program: int, control: int) -> dict[str, Any]:
    """Wait until the program ends or the other end of ``control`` is closed. Return how the program ended."""
    exit_reader = os.pidfd_open(program)
    poll = select.poll()
    poll.register(exit_reader, select.POLLIN)
    poll.register(control, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    if exit_reader not in ready:
        with suppress(ProcessLookupError):
            os.killpg(program, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)
    _, status, usage = os.wait4(program, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_memory_bytes": usage.ru_maxrss << 10,
    }


def _end_descendants(path: str) -> None:
    """End all processes that the program started, in any session; needed only without a process namespace."""
    from importlib.machinery import SourceFileLoader

    SourceFileLoader("process_tree", path).load_module().end_descendants(os.getpid())
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _guarded(status: int, work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        _report(status, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(1)


def _report(status: int, content: dict[str, Any]) -> None:
    with suppress(OSError):  # the caller is gone
        os.write(status, json.dumps(content).encode() + b"\n")


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (0, 1):  # a process outside the namespace appears as 0
        os._exit(1)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), f"mount of {source or target}")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
