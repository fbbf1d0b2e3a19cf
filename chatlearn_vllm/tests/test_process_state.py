"""What an engine in the caller's process leaves alone."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from chatlearn_vllm.engine_side.process_state import (
    EngineLogHandler,
    bind_threads,
    engine_log,
    preserved,
    threads_bound,
)


def test_random_states_and_threads_are_put_back():
    def draw():
        return random.random(), float(np.random.random()), float(torch.rand(()))

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    set_num_threads = torch.set_num_threads
    with preserved():
        draw()
        torch.set_num_threads = None
    assert draw() == expected
    assert torch.set_num_threads is set_num_threads


def test_one_engines_binding_is_not_the_next_ones(monkeypatch):
    name = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(name, raising=False)
    with threads_bound(1):
        assert os.environ[name] == "nobind"
    assert name not in os.environ
    monkeypatch.setenv(name, "3|4")
    with threads_bound(2):
        assert os.environ[name] == "3|4"
    assert os.environ[name] == "3|4"


@pytest.mark.parametrize(
    ("cores", "num_workers", "expected"),
    [
        ({0, 1}, 1, "nobind"),
        ({0, 1}, 2, "0|1"),
        ({4, 5, 6, 7, 9}, 2, "4,5|6,7"),
        ({0}, 2, "nobind"),
    ],
)
def test_workers_get_equal_parts_of_the_cores(monkeypatch, cores, num_workers, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    assert bind_threads(num_workers) == expected


@pytest.fixture
def vllm_logger(monkeypatch):
    logger = logging.getLogger("vllm")
    before = (list(logger.handlers), logger.level, logger.propagate)
    logger.handlers[:] = [logging.NullHandler()]
    yield logging.getLogger("vllm.somewhere")
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_vllm_log_messages_are_kept_and_only_important_ones_are_forwarded(vllm_logger, caplog):
    words = engine_log("error")
    assert engine_log("error") is words, "the engines of a process share one"
    vllm_logger.info("loading %s", "weights")
    vllm_logger.error("no memory")
    assert words.last() == "info: loading weights\nerror: no memory"
    assert caplog.messages == ["no memory"]
    engine_log("info")
    vllm_logger.info("ready")
    assert caplog.messages == ["no memory", "ready"]


def test_only_the_last_log_messages_are_kept(vllm_logger):
    words = engine_log("error")
    assert isinstance(words, EngineLogHandler)
    for number in range(100):
        vllm_logger.info("%d", number)
    assert words.last(2) == "info: 98\ninfo: 99"


@pytest.mark.engine
def test_an_engine_starts_after_the_group_that_another_used_was_taken_down(model_dir, make_replica):
    """As when a trainer in this process closes, and another run begins."""
    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = make_replica(model_dir())
    assert torch.equal(torch.rand(3), expected), "starting an engine moved torch's random state"
    tokens = first.generate([5, 9, 3]).token_ids.tolist()
    dist.destroy_process_group()
    assert first.generate([5, 9, 3]).token_ids.tolist() == tokens
    first.close()
    second = make_replica(model_dir())
    assert second.generate([5, 9, 3]).token_ids.tolist() == tokens
    second.close()


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize(("environment", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_memory_that_a_reload_frees_is_kept_unless_the_user_says_otherwise(environment, is_kept):
    """In a process of its own: it is for good. 64 MiB are touched and freed; resident pages show who has them."""
    script = """
import torch
from pathlib import Path
from chatlearn_vllm.engine_side.process_state import keep_freed_memory, return_freed_memory

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

done = keep_freed_memory()
before = resident_mib()
tensor = torch.ones(64 << 20, dtype=torch.uint8)
above = torch.ones(1 << 20, dtype=torch.uint8)  # keeps the freed memory from being the end of the heap
held = resident_mib()
del tensor
freed = resident_mib()
return_freed_memory()
print(done, held - before >= 60, freed - before >= 60, resident_mib() - before >= 60)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | environment
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(is_kept), "True", str(is_kept), "False"]
