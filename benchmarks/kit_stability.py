"""How often the conformance suites fail on plugins that conform, on a machine that is busy.

    python benchmarks/kit_stability.py [--passes 50] [--kinds KIND ...] [--at-once N] [--hogs N] [--output FILE]

Runs the suites of all templates, again and again, each in a process of its own and several at a time, beside processes
that keep every core busy. Every failure is a flake. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "conformance"), str(ROOT / "benchmarks")]

from machine import machine_facts  # noqa: E402  # of the folders above
from mutation_run import ENVIRONMENT, PRELOADED, SEARCHED, Outcome, Runner, versions  # noqa: E402  # likewise
from source_mutants import HOOKS, TEMPLATE  # noqa: E402  # likewise

from chatlearn_hosting.fork_server import ForkServer  # noqa: E402  # after the folders above

PATIENCE_S = 120.0
"""As in a suite that an author runs."""


def hog() -> None:
    """Keep one core busy."""
    while True:
        sum(range(1_000_000))


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Run this many busy processes inside the block."""
    running = [multiprocessing.Process(target=hog, daemon=True) for _ in range(count)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--passes", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", choices=list(HOOKS), default=list(HOOKS), help="templates")
    parser.add_argument("--at-once", type=int, default=2 * cores, help="suites that run at a time")
    parser.add_argument("--hogs", type=int, default=cores, help="busy processes beside the suites")
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit for one suite")
    parser.add_argument("--until-s", type=float, help="start no further pass after this time")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    chosen = parser.parse_args()
    begun, done, runs = time.monotonic(), 0, Counter[str]()
    failures: list[Outcome] = []
    with (
        hogs(chosen.hogs),
        tempfile.TemporaryDirectory(prefix="chatlearn-stability-") as workspace,
        ForkServer(*PRELOADED, path=SEARCHED, environment=ENVIRONMENT) as server,
        ThreadPoolExecutor(chosen.at_once) as pool,
    ):
        runner = Runner(server, Path(workspace), chosen.limit_s, PATIENCE_S)
        for done in range(1, chosen.passes + 1):
            for outcome in pool.map(lambda kind: runner.run(kind, TEMPLATE, None), chosen.kinds):
                runs[outcome.kind] += 1
                if outcome.verdict != "passed":
                    failures.append(outcome)
                    print(f"pass {done}: {outcome.kind}: {outcome.by}: {outcome.reason}", flush=True)
            print(f"pass {done} of {chosen.passes}, {time.monotonic() - begun:.0f} s", flush=True)
            if chosen.until_s is not None and time.monotonic() - begun > chosen.until_s:
                break
    result = {
        "benchmark": "kit_stability",
        "machine": machine_facts(),
        "versions": versions(),
        "at_once": chosen.at_once,
        "hogs": chosen.hogs,
        "passes": done,
        "runs": dict(runs),
        "failures": [{"kind": o.kind, "by": o.by, "reason": o.reason} for o in failures],
        "wall_s": round(time.monotonic() - begun, 1),
    }
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
