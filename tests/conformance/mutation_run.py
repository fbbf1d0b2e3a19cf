"""Runs the whole suite on every mutant of plugins' sources, and reports by kind and class which faults were noticed.

    python tests/conformance/mutation_run.py [--select PATTERN ...] [--processes N] [--write [--update]]

Each mutant runs in a process of its own, forked from one that has torch loaded, under a time limit. The contract test
meant for a fault runs first, then all others; the first failure ends the run of the mutant. The unedited packages run
first and must pass. With ``--write``, results go to ``benchmarks/results/mutants.json`` and ``docs/mutants.md``.

Exit code 1: an original fails, fewer than 98% of the mutants are caught, or a survivor is not explained.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "benchmarks")]

import engine_mutants  # noqa: E402
import template_mutants  # noqa: E402
from machine import machine_facts  # noqa: E402
from mutant_groups import GROUPS  # noqa: E402
from source_mutants import TEMPLATE, SourceMutant, source_of, suite_of, write_mutant  # noqa: E402

from chatlearn_core.plugins.records import Kind  # noqa: E402
from chatlearn_hosting.fork_server import ForkServer  # noqa: E402

PRELOADED = (
    "chatlearn_testing.check",
    "chatlearn_hf.plain_forward",
    "chatlearn_hf.tiny",
    "chatlearn_trainer_kit.micro_batch_trainer",
    "chatlearn_generator_kit.replica",
    "safetensors.torch",
)
"""Loaded once; none of them is a package under test."""
SEARCHED = (str(HERE), str(ROOT / "benchmarks"))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
REQUIRED = 0.98
"""Share of the mutants, apart from explained ones, that must be caught."""
RECORDS = "plugin.py"
"""Module of the record: a mutant that declares more makes tests apply which the original skips."""
PATIENCE_S = 20.0
"""Time after which an operation of a mutant counts as hanging, seconds."""
LIMIT_S = 300.0
"""Time for one mutant, seconds. A mutant that exceeds it is caught: ``plugins check`` reports it as a failure."""
ORIGINAL_LIMITS = 4
"""An original runs every test, which takes longer than to the first failure."""
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
DOCUMENT = ROOT / "docs" / "mutants.md"
ENGINE_SETTINGS: Mapping[str, Any] = {"build_model": "mutation_run:build_engine_model"}
MUTANTS: tuple[SourceMutant, ...] = (*template_mutants.MUTANTS, *engine_mutants.MUTANTS)


@dataclass(slots=True, frozen=True)
class Outcome:
    """What became of one mutant, or of an original."""

    id: str
    kind: Kind
    package: str
    group: str
    """Class of the fault; empty for an original."""
    verdict: str
    """``caught``, ``survived``, ``explained`` (survived, and no caller can see it), ``passed`` or ``failed``."""
    by: str
    """The test that failed and its phase, or the time limit."""
    seconds: float
    reason: str = ""


def build_engine_model(target: Path) -> Path:
    """Build the model of plugins on real engines: weights so large that greedy text does not repeat, one layer."""
    from chatlearn_hf.tiny import build_tiny_model

    return build_tiny_model(target, "qwen3", hidden=32, layers=1, max_length=128, initializer_range=0.2)


# In the forked process


def run_one(order: str) -> None:
    """Run one mutant, or an original, and write its outcome to ``outcome.json`` in its folder."""
    os.setpgid(0, 0)
    named = json.loads(order)
    folder = Path(named["folder"])
    mutant = next((m for m in MUTANTS if m.id == named["mutant"]), None)
    kind, package = named["kind"], named["package"]
    target = folder / "src" / package
    shutil.copytree(source_of(kind, package), target)
    if mutant is not None:
        write_mutant(mutant, target)
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(temporary), str(temporary)
    os.chdir(folder)
    sys.path.insert(0, str(target.parent))
    importlib.invalidate_caches()
    assert package not in sys.modules, f"{package} was loaded before it was edited"

    import torch

    from chatlearn_testing.check import TestVerdict, run_suites
    from chatlearn_testing.suites import ConformanceSuite, RuntimeConformance

    torch.set_num_threads(1)
    ConformanceSuite.patience_s = named["patience_s"]
    RuntimeConformance.patience_s = 3 * named["patience_s"]  # it starts processes

    def on_verdict(verdict: TestVerdict) -> None:
        if verdict.verdict == "failed":
            phase = verdict.reason.partition(":")[0]
            _end(folder, {"failed": verdict.test, "phase": phase, "reason": verdict.reason})

    try:
        key, suite = suite_of(kind, package, folder / "model", ENGINE_SETTINGS if package != TEMPLATE else None)
        first = [mutant.caught_by] if mutant is not None and hasattr(suite, mutant.caught_by) else []
        for select in ([first] if first else []) + [[]]:
            results = run_suites({key: suite}, select=select, on_verdict=on_verdict)
    except BaseException as error:
        _end(
            folder,
            {"failed": "the suite cannot be built", "phase": "setup", "reason": f"{type(error).__name__}: {error}"},
        )
    passed = sorted({v.test.partition("[")[0] for v in results.of("passed")})
    _end(folder, {"failed": "", "passed": passed})


def _end(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the outcome and end the process, whatever the mutant still runs."""
    unfinished = folder / "outcome.unfinished"
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.rename(folder / "outcome.json")
    os._exit(0)


# In the process that reports


class Runner:
    """Runs mutants in forked processes, several at a time."""

    def __init__(self, server: ForkServer, workspace: Path, limit_s: float, patience_s: float) -> None:
        self._server = server
        self._workspace = workspace
        self._limit_s = limit_s
        self._patience_s = patience_s
        self._lock = threading.Lock()

    def run(self, kind: Kind, package: str, mutant: SourceMutant | None) -> Outcome:
        """Run one mutant, or the original of a package, to its end or to the limit."""
        name = f"{kind}-{package}-original" if mutant is None else mutant.id
        folder = self._workspace / name
        folder.mkdir()
        order = {
            "folder": str(folder),
            "kind": kind,
            "package": package,
            "mutant": name,
            "patience_s": self._patience_s,
        }
        begun = time.monotonic()
        with self._lock:
            process = self._server.start("mutation_run:run_one", json.dumps(order))
        code = process.wait(self._limit_s if mutant is not None else ORIGINAL_LIMITS * self._limit_s)
        seconds = time.monotonic() - begun
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        file = folder / "outcome.json"
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
        elif code is None:
            found = {"failed": f"the limit of {self._limit_s:g} s", "phase": "limit"}
        else:
            found = {"failed": f"the process ended with {code}", "phase": "process"}
        shutil.rmtree(folder, ignore_errors=True)
        return _outcome(kind, package, mutant, name, found, seconds)


def _outcome(
    kind: Kind, package: str, mutant: SourceMutant | None, name: str, found: Mapping[str, Any], seconds: float
) -> Outcome:
    failed = f"{found['failed']} ({found['phase']})" if found["failed"] else ""
    reason = str(found.get("reason", "")).partition("\n    For further information")[0]  # an address, by pydantic
    reason = _without_own_paths(reason)[:500]
    if mutant is None:
        unused = {m.caught_by for m in MUTANTS if (m.kind, m.package) == (kind, package) and m.file != RECORDS} - set(
            found.get("passed", ())
        )
        if not failed and unused:
            failed, reason = "no contract test of its mutants may be skipped", ", ".join(sorted(unused))
        return Outcome(name, kind, package, "", "failed" if failed else "passed", failed, round(seconds, 1), reason)
    verdict = "caught" if failed else "explained" if mutant.equivalent else "survived"
    return Outcome(name, kind, package, GROUPS[mutant.caught_by], verdict, failed, round(seconds, 1), reason)


def _without_own_paths(reason: str) -> str:
    """Return a reason with paths relative to the repository and to the interpreter, as on any machine."""
    for directory in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        reason = reason.replace(f"{directory}/", "")
    return reason


def run_all(mutants: Sequence[SourceMutant], processes: int, limit_s: float, patience_s: float) -> Iterator[Outcome]:
    """Run the originals of these mutants, then the mutants; yields outcomes as they come."""
    originals = dict.fromkeys((m.kind, m.package) for m in mutants)
    with (
        tempfile.TemporaryDirectory(prefix="chatlearn-mutants-") as workspace,
        ForkServer(*PRELOADED, path=SEARCHED, environment=ENVIRONMENT) as server,
        ThreadPoolExecutor(processes) as pool,
    ):
        runner = Runner(server, Path(workspace), limit_s, patience_s)
        waiting = [pool.submit(runner.run, kind, package, None) for kind, package in originals]
        waiting += [pool.submit(runner.run, m.kind, m.package, m) for m in mutants]
        for done in as_completed(waiting):
            yield done.result()


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table: rows are kinds and classes, columns caught, explained and survived."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        if outcome.group:
            what = f"{outcome.kind}" if outcome.package == TEMPLATE else f"{outcome.kind} ({outcome.package})"
            counts[what, outcome.group][outcome.verdict] += 1
    lines = ["| plugin | class | mutants | caught | explained | survived |", "|---|---|---|---|---|---|"]
    total: Counter[str] = Counter()
    for (what, group), found in sorted(counts.items()):
        total += found
        lines.append(_row(what, group, found))
    lines.append(_row("**all**", "", total))
    return "\n".join(lines)


def _row(what: str, group: str, found: Counter[str]) -> str:
    parts = (sum(found.values()), found["caught"], found["explained"], found["survived"])
    return f"| {what} | {group} | {' | '.join(map(str, parts))} |"


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    names = (
        "chatlearn-testing",
        "chatlearn-core",
        "chatlearn-transformers",
        "chatlearn-fsdp",
        "torch",
        "transformers",
        "numpy",
        "pytest",
    )
    return {name: metadata.version(name) for name in names}


def document(outcomes: Sequence[Outcome], mutants: Sequence[SourceMutant], run: Mapping[str, Any]) -> str:
    """Return ``docs/mutants.md``; ``run`` is the recorded result."""
    machine = run["machine"]
    survivors = [o for o in outcomes if o.verdict == "survived"]
    why = {m.id: m.equivalent for m in mutants if m.equivalent}
    explained = [f"- `{o.id}`: {why[o.id]}" for o in outcomes if o.verdict == "explained"]
    lines = [
        "# Mutants of the conformance kit",
        "",
        "Each mutant is a plugin with one fault: an edit of a template's source, or of a first-party plugin on a real"
        " engine. The whole",
        "suite of its kind ran on it. *Caught*: a contract test failed, the process ended, or the time limit passed."
        " *Explained*: it survived,",
        "and no caller can see the fault. The unedited packages pass. `make test-mutants` writes this page.",
        "",
        table(outcomes),
        "",
        f"The last run: {machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']}, {run['wall_s']:.0f} s"
        f" with {run['processes']} processes; {', '.join(f'{n} {v}' for n, v in run['versions'].items())}.",
        "",
    ]
    known = {outcome.id for outcome in outcomes}
    if missing := [f"- `{m.id}`" for m in mutants if m.id not in known]:
        lines += ["## Not in this record", *missing, ""]
    if failed := [f"- `{o.id}`: {o.by}" for o in outcomes if o.verdict == "failed"]:
        lines += ["## Unedited packages that did not pass", *failed, ""]
    if explained:
        lines += ["## Explained", *explained, ""]
    if survivors:
        lines += ["## Survivors", *(f"- `{o.id}` ({o.group})" for o in survivors), ""]
    return "\n".join(lines)


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--select", nargs="*", default=["*"], help="patterns of ids, such as 'reward-*'")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit for one mutant")
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, help="time limit for one operation of a mutant")
    parser.add_argument(
        "--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)} and {DOCUMENT.relative_to(ROOT)}"
    )
    parser.add_argument("--update", action="store_true", help="keep the results on file of mutants that do not run now")
    parser.add_argument("--output", type=Path, help="write the results as JSON to this file")
    chosen = parser.parse_args()
    mutants = [m for m in MUTANTS if any(fnmatch(m.id, pattern) for pattern in chosen.select)]
    if not mutants:
        parser.error(f"no mutant matches {' '.join(chosen.select)}")
    begun, outcomes = time.monotonic(), []
    for number, outcome in enumerate(run_all(mutants, chosen.processes, chosen.limit_s, chosen.patience_s), 1):
        outcomes.append(outcome)
        mark = "" if outcome.verdict in ("caught", "passed") else f"  <-- {outcome.reason}"
        print(f"{number:4} {outcome.verdict:9} {outcome.id}  {outcome.by} {outcome.seconds:.1f} s{mark}", flush=True)
    order = {m.id: index for index, m in enumerate(mutants)}
    if chosen.update:
        outcomes += earlier(RESULTS, {outcome.id for outcome in outcomes})
        mutants = list(MUTANTS)
        order = {m.id: index for index, m in enumerate(mutants)}
    outcomes.sort(key=lambda outcome: order.get(outcome.id, -1))
    content = {
        "benchmark": "mutants",
        "machine": machine_facts(),
        "versions": versions(),
        "wall_s": round(time.monotonic() - begun, 1),
        "processes": chosen.processes,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    print(table(outcomes))
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if chosen.write:
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        DOCUMENT.write_text(document(outcomes, mutants, content), encoding="utf-8")
    return report(outcomes)


def earlier(file: Path, known: Collection[str]) -> list[Outcome]:
    """Return the outcomes on file of what did not run now, as far as these mutants still exist."""
    mutants = {m.id: m for m in MUTANTS}
    found = []
    for entry in json.loads(file.read_text(encoding="utf-8"))["outcomes"] if file.exists() else ():
        outcome = Outcome(**entry)
        mutant = mutants.get(outcome.id)
        if outcome.id in known or (mutant is None and outcome.group):
            continue
        if mutant is not None and outcome.verdict != "caught":
            outcome = replace(outcome, verdict="explained" if mutant.equivalent else "survived")
        found.append(outcome)
    return found


def report(outcomes: Sequence[Outcome]) -> int:
    """Print what is wrong; returns the exit code."""
    failed = [o for o in outcomes if o.verdict == "failed"]
    survived = [o for o in outcomes if o.verdict == "survived"]
    judged = [o for o in outcomes if o.verdict in ("caught", "survived")]
    share = sum(o.verdict == "caught" for o in judged) / max(1, len(judged))
    for outcome in failed:
        print(f"the original {outcome.id} does not pass: {outcome.by}: {outcome.reason}")
    for outcome in survived:
        print(f"not caught and not explained: {outcome.id} ({outcome.group})")
    print(
        f"{share:.1%} of {len(judged)} mutants caught; {REQUIRED:.0%} are required, and an explanation of every other"
    )
    return int(bool(failed or survived or share < REQUIRED))


if __name__ == "__main__":
    sys.modules.setdefault("mutation_run", sys.modules["__main__"])
    sys.exit(main())
