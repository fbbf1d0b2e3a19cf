"""CPU time of ``chatlearn plugins list`` beyond bare Python, and what it imports.

Aim: under 0.5 s of CPU time (user and system, of the process and its children) beyond ``python -c pass``. Prints a
short table, and one JSON line last.

    python benchmarks/plugin_listing.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from machine import machine_facts

AIM_S = 0.5
BARE = ["-c", "pass"]
LIST = ["-m", "chatlearn_cli.main", "plugins", "list"]
HELP = ["-m", "chatlearn_cli.main", "--help"]
LIST_MODULES = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))
from chatlearn_cli.main import main
main(["plugins", "list"])
"""


def cpu_seconds(arguments: list[str]) -> float:
    """User and system time of one run of this interpreter."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"python {' '.join(arguments)} failed with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def measure(commands: dict[str, list[str]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each command, taken in turns so that a busy machine disturbs all alike; the first is warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats + 1):
        for name, arguments in commands.items():
            taken[name].append(cpu_seconds(arguments))
    return {name: times[1:] for name, times in taken.items()}


def imported_packages() -> list[str]:
    """Top-level packages outside the standard library that ``plugins list`` has imported when it ends.

    Read from ``sys.modules``: ``-X importtime`` does not see what ``importlib.import_module`` imports.
    """
    done = subprocess.run([sys.executable, "-c", LIST_MODULES], capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}
    return sorted(name for name in packages if name not in sys.stdlib_module_names and not name.startswith("_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    taken = measure({"bare": BARE, "list": LIST, "help": HELP}, repeats)
    bare = statistics.median(taken["bare"])
    beyond = {name: statistics.median(times) - bare for name, times in taken.items() if name != "bare"}
    packages = imported_packages()
    heavy = [name for name in ("torch", "transformers", "vllm", "sglang", "ray") if name in packages]

    for name, times in taken.items():
        print(f"{name:<5} median {statistics.median(times):.3f} s CPU (from {min(times):.3f} to {max(times):.3f})")
    print("imported:", ", ".join(packages))
    print(
        json.dumps(
            {
                "benchmark": "plugin_listing",
                "cpu_beyond_bare_python_s": round(beyond["list"], 4),
                "aim_s": AIM_S,
                "met": beyond["list"] < AIM_S and not heavy,
                "help_cpu_beyond_bare_python_s": round(beyond["help"], 4),
                "bare_python_s": round(bare, 4),
                "repeats": repeats,
                "range_s": [round(min(taken["list"]), 4), round(max(taken["list"]), 4)],
                "imported": packages,
                "heavy_imported": heavy,
                "machine": machine_facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
