"""The quickstart: a small model learns arithmetic word problems by reinforcement learning, from nothing, on a laptop.

It builds a new-born Qwen3 and its tokenizer, makes word problems, warms the model up on demonstrations (SFT), trains it
with GRPO against the math reward, and shows what that did on problems it has never seen. The two training commands are
the ones anybody would type; they are printed before they run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from chatlearn_data import arithmetic
from chatlearn_data.output import write_records
from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer

HERE = Path(os.path.relpath(Path(__file__).parent))
NUM_HELDOUT, NUM_VALIDATION = 300, 300
NUM_TRAIN, NUM_DEMONSTRATIONS = 4000, 19200
WORKED_SHARES = (0.35, 0.85)
"""Demonstrations show their working seldom for some wordings, often for others. What GRPO mostly finds out is that
working pays: it makes the model show it everywhere, and then makes fewer slips in it."""
SPLIT_TITLES = {"heldout": "Held-out", "validation": "Validation"}


def main() -> None:
    """Run the quickstart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of model, data and training")
    parser.add_argument("--directory", type=Path, default=Path("runs/demo"), help="where everything is written")
    parser.add_argument(
        "--eval", choices=("heldout", "validation"), default="heldout", help="settings are chosen on validation only"
    )
    parser.add_argument("override", nargs="*", metavar="KEY=VALUE", help="settings of the GRPO run to replace")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    start = time.monotonic()
    directory: Path = arguments.directory
    if status_of(directory / "grpo") == "completed":
        console.print(f"{directory} holds a finished demo; delete it, or choose another --directory, to run it again.")
        show_result(console, directory, arguments.eval)
        return

    console.print("[bold]1. An untrained model, and word problems[/]")
    make_data(directory / "data", arguments.seed)
    make_model(directory / "start", arguments.seed)
    console.print("   " + example_problem(directory / "data"))

    console.print("[bold]2. Warm-up: supervised fine-tuning on demonstrations[/]")
    if status_of(directory / "sft") == "completed":
        console.print("   done before")
    else:
        chatlearn(
            console,
            "run",
            str(HERE / "sft.yaml"),
            f"seed={arguments.seed}",
            f"output_dir={directory}/sft",
            f"model.path={directory}/start",
            f"data.train.0.path={directory}/data/sft.jsonl",
        )
    console.print("[bold]3. Reinforcement learning: GRPO against the math reward[/]")
    chatlearn(
        console,
        "run",
        str(HERE / "grpo.yaml"),
        f"seed={arguments.seed}",
        f"output_dir={directory}/grpo",
        f"model.path={directory}/sft/model",
        f"data.train.0.path={directory}/data/train.jsonl",
        f"data.eval.0.path={directory}/data/{arguments.eval}.jsonl",
        *arguments.override,
    )
    chatlearn(console, "report", f"{directory}/grpo")
    show_result(console, directory, arguments.eval)
    console.print(f"  time     {time.monotonic() - start:.0f} s in all")


def status_of(run_dir: Path) -> str | None:
    """How a run ended; None while it has not."""
    summary = run_dir / "summary.json"
    return str(json.loads(summary.read_text(encoding="utf-8"))["status"]) if summary.exists() else None


def make_data(directory: Path, seed: int) -> None:
    """Write train, validation, heldout and sft; no problem (operation and operands) is in two of the first three."""
    splits = arithmetic.split_problems(arithmetic.problems(), validation=NUM_VALIDATION, heldout=NUM_HELDOUT, seed=seed)
    files = {
        "train": list(arithmetic.prompt_records(splits.train, "train", NUM_TRAIN, seed)),
        "validation": list(arithmetic.prompt_records(splits.validation, "validation", NUM_VALIDATION, seed)),
        "heldout": list(arithmetic.prompt_records(splits.heldout, "heldout", NUM_HELDOUT, seed)),
        "sft": list(
            arithmetic.demonstration_records(splits.train, "sft", NUM_DEMONSTRATIONS, seed, worked_shares=WORKED_SHARES)
        ),
    }
    # What counts is what was written: the check reads the problems back from the rows themselves.
    problems = {name: [arithmetic.problem_of(record) for record in records] for name, records in files.items()}
    arithmetic.check_disjoint(
        {
            "training": {p for name in ("train", "sft") for p in problems[name]},
            "validation": set(problems["validation"]),
            "held-out": set(problems["heldout"]),
        }
    )
    for name, records in files.items():
        write_records(directory / f"{name}.jsonl", records)


def make_model(directory: Path, seed: int) -> None:
    """A random Qwen3 with about half a million parameters; its tokenizer writes numbers digit by digit."""
    rng = random.Random(0)
    problems = arithmetic.problems()
    chats = [
        f"user\n{arithmetic.render(problem, rng)}\nassistant\n{arithmetic.solution(problem)}"
        for problem in rng.choices(problems, k=4000)
    ]
    tokenizer = build_tiny_tokenizer(512, chats, extra_tokens=[*"0123456789", "\\boxed{"])
    build_tiny_model(
        directory,
        "qwen3",
        tokenizer=tokenizer,
        hidden=128,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate=384,
        initializer_range=0.05,
        seed=seed,
    )


def example_problem(directory: Path) -> str:
    """The first problem of the training file."""
    with (directory / "train.jsonl").open(encoding="utf-8") as stream:
        return str(json.loads(next(stream))["prompt"][0]["content"])


def chatlearn(console: Console, *arguments: str) -> None:
    """Run a command the way a user would, and stop if it fails."""
    console.print(f"   [dim]$ chatlearn {' '.join(arguments)}[/]", soft_wrap=True)
    finished = subprocess.run([sys.executable, "-m", "chatlearn_cli.main", *arguments], check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


def show_result(console: Console, directory: Path, split: str) -> None:
    """Accuracy before and after, where to look, what to try next."""
    accuracy = json.loads((directory / "grpo" / "summary.json").read_text(encoding="utf-8"))["eval/accuracy"]
    rise = 100 * (accuracy["after"] - accuracy["before"])
    console.print(
        f"\n[bold]{SPLIT_TITLES[split]} accuracy: {accuracy['before']:.1%} -> {accuracy['after']:.1%}[/]  "
        f"({rise:+.1f} points)\n"
        f"  report   {directory}/grpo/report.html\n"
        f"  model    {directory}/grpo/model\n"
        f"  next     the same with another algorithm, by name:\n"
        f"           .venv/bin/chatlearn run {directory}/grpo/config.yaml algorithm.name=dr_grpo "
        f"output_dir={directory}/dr_grpo",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
