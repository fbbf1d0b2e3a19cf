"""The copies in a program of their own, with a stand-in for SGLang that notes where it was imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ENGINE = """
import multiprocessing as mp, os

LOADED_IN = os.getpid()

def start(target, *args):
    mp.set_start_method("spawn", force=True)
    process = mp.Process(target=target, args=args)
    process.start()
    return process
"""
PROGRAM = """
import json, os, signal, sys, time
import multiprocessing
from chatlearn_sglang.engine_side.process_copies import use_copies

def facts(writer):
    from sglang.srt.entrypoints import engine
    writer.send({"loaded_in": engine.LOADED_IN, "pid": os.getpid(), "parent": os.getppid(),
                 "setting": os.environ["SETTING"], "gone": "GONE" in os.environ, "open": is_open(HELD)})

def is_open(descriptor):
    return not os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))

def sleep():
    time.sleep(600)

def complain():
    os.kill(os.getppid(), signal.SIGQUIT)  # to the parent, as a scheduler that fails

if __name__ == "__main__":
    HELD, _ = os.pipe()  # such as the connection to the adapter
    os.environ["GONE"] = "1"
    use_copies()
    from sglang.srt.entrypoints import engine

    del os.environ["GONE"]
    os.environ["SETTING"] = "made before the start"
    reader, writer = engine.mp.Pipe(duplex=False)
    first = engine.start(facts, writer)
    told = reader.recv()
    first.join()
    heard = []
    signal.signal(signal.SIGQUIT, lambda *_: heard.append(True))
    engine.start(complain)
    while not heard:
        time.sleep(0.01)
    killed = engine.start(sleep)
    killed.kill()
    killed.join()
    print(json.dumps(told | {"pid_seen": first.pid, "here": os.getpid(), "codes": [first.exitcode, killed.exitcode],
                             "method": multiprocessing.get_start_method()}))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("program")
    package = folder / "sglang" / "srt"
    for name in ("entrypoints", "models"):
        (package / name).mkdir(parents=True)
    (package / "entrypoints" / "engine.py").write_text(ENGINE)
    (package / "models" / "registry.py").write_text("")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_processes_are_copies_with_the_environment_of_their_start(told) -> None:
    assert told["loaded_in"] == told["here"], "it imported the engine anew"
    assert told["pid"] == told["pid_seen"] not in (told["here"], told["parent"])
    assert (told["setting"], told["gone"]) == ("made before the start", False)
    assert told["method"] == "spawn", "other processes start as SGLang wants it"


def test_nothing_of_the_engines_process_is_held(told) -> None:
    assert told["open"] is False


def test_their_ends_are_known_and_a_failure_reaches_the_engine(told) -> None:
    assert told["codes"] == [0, -9]
