"""Does every algorithm learn? Runs each from one warm start on the arithmetic task, and prints a table with seeds.

A small Qwen3 is fine-tuned on demonstrations that show their working only sometimes (SFT, once). Every run starts from
this warm start and is judged on held-out problems by the rule reward, with greedy answers. Preferences are pairs of a
right and a wrong completion that the warm start sampled; the held-out pairs answer held-out problems. The reward model
also learns from pairs that the policy of ``grpo`` sampled, because PPO asks it about such completions later. A run is a
directory: finished ones are kept, and a run that was stopped resumes. Delete a run's directory after a change of its
recipe; the table marks results of recipes that have changed since.

    python benchmarks/learning.py                              # every algorithm, one seed
    python benchmarks/learning.py --seeds 0 1 2 --processes 8
    python benchmarks/learning.py --only grpo ppo dpo

Writes ``table.md``, ``learning.svg`` and ``learning.json`` to ``--directory``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml
from machine import machine_facts

from chatlearn_data import arithmetic
from chatlearn_data.output import write_records
from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_HELDOUT, NUM_HELDOUT_PROMPTS, NUM_TRAIN = 100, 400, 2000
"""Held-out problems, the prompts that ask them (each problem in several wordings), and prompts to train on."""
NUM_PAIR_PROMPTS, NUM_HELDOUT_PAIR_PROMPTS, PAIRS_PER_PROMPT = 1600, 200, 4
"""Prompts to sample pairs of, for training and held out; most have both a right and a wrong completion."""
WORKED_SHARES = (0.35, 0.85)
"""Demonstrations show their working seldom for some wordings, often for others; answers with working are mostly right,
so an algorithm that learns makes the model show its working everywhere."""
SFT_STEPS, SFT_BATCH = 260, 32
ROLES = ("trainer", "generator", "reward")
HELDOUT_PAIRS, HELDOUT_FILE = "heldout_pairs", "heldout_accuracy.json"
CHANGED = "recipe changed since"


@dataclass(frozen=True)
class Recipe:
    """How an algorithm is run, and what it must reach."""

    options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = ""
    """By default the name of the recipe."""
    roles: Sequence[str] = ROLES
    learning_rate: float = 3e-4
    schedule: str = "constant"
    """Of the learning rate."""
    warmup_steps: int = 0
    """Updates in which the learning rate rises."""
    filters: Sequence[str] = ()
    """``rollout.filters``, without options."""
    steps: int = 20
    batch: int = 16
    mini_batches: int = 2
    gain: float = 0.1
    """What held-out accuracy must rise by; its standard error is at most 0.05, as if the wordings of each of the 100
    problems were answered alike."""
    pairs: bool = False
    """Learns from the pairs, and is evaluated on held-out pairs."""
    of_pairs: float = 0.0
    """Smallest accuracy on held-out pairs after training."""
    policy_pairs: bool = False
    """Learns also from pairs that the model of ``needs`` sampled."""
    needs: str = ""
    """A recipe whose model this one uses."""


GROUPS = {"group_size": 8}
CRITIC = (*ROLES, "critic")
ON_PAIRS = Recipe(roles=("trainer", "reference"), pairs=True, steps=24, of_pairs=0.6, gain=0.0, learning_rate=1e-4)
WITHOUT_REFERENCE = replace(
    ON_PAIRS, roles=("trainer",), steps=96, batch=32, learning_rate=5e-5, schedule="linear", warmup_steps=10
)
"""Nothing but small updates holds the policy where it was, so these take more and smaller ones."""
RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(GROUPS),
    "dr_grpo": Recipe(GROUPS),
    "dapo": Recipe(GROUPS),
    "gspo": Recipe(GROUPS | {"clip_low": 0.2, "clip_high": 0.2}, steps=40),
    "cispo": Recipe(GROUPS, steps=40),
    "gdpo": Recipe(GROUPS | {"rewards": {"math": 1.0, "format": 0.5}}, roles=("trainer", "generator", "two_rewards")),
    "rloo": Recipe(GROUPS),
    "reinforce_pp": Recipe(batch=128),
    "reinforce_pp_baseline": Recipe(GROUPS),
    "maxrl": Recipe(GROUPS),
    "ppo": Recipe({"gae_lambda": 1.0, "critic_epochs": 2}, roles=CRITIC, batch=128),
    "decoupled_ppo": Recipe({"gae_lambda": 1.0, "critic_epochs": 2}, roles=CRITIC, batch=128),
    "dpo": ON_PAIRS,
    "ipo": ON_PAIRS,
    "simpo": WITHOUT_REFERENCE,
    "orpo": WITHOUT_REFERENCE,
    "kto": ON_PAIRS,
    "online_dpo": Recipe(GROUPS | {"pairing": "all"}, roles=(*ROLES, "reference"), steps=80),
    "rejection_sampling": Recipe(GROUPS | {"keep": 2, "min_reward": 1.0}),
    "distillation": Recipe(
        {"divergence": "reverse_kl", "top_k": 16}, roles=(*ROLES, "teacher"), batch=64, needs="grpo"
    ),
    "reward_model": replace(
        ON_PAIRS,
        roles=("scorer",),
        of_pairs=0.75,
        steps=800,
        batch=32,
        learning_rate=6e-4,
        schedule="linear",
        warmup_steps=20,
        policy_pairs=True,
        needs="grpo",
    ),
    "ppo_reward_model": Recipe(
        {"gae_lambda": 1.0, "critic_epochs": 2, "kl_coef": 0.5},
        algorithm="ppo",
        roles=("trainer", "generator", "critic", "reference", "learned_reward"),
        filters=("running_normalisation",),
        learning_rate=1e-4,
        steps=16,
        batch=128,
        needs="reward_model",
    ),
}


def recipe_hash(name: str) -> str:
    """Of what a recipe sets, and of the recipes that it needs; a new setting with its default changes nothing."""
    recipe, default = RECIPES[name], Recipe()
    values = {one.name: getattr(recipe, one.name) for one in fields(Recipe)}
    content: dict[str, Any] = {key: value for key, value in values.items() if value != getattr(default, key)}
    if recipe.needs:
        content["needs"] = [recipe.needs, recipe_hash(recipe.needs)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def roles_of(recipe: Recipe, directory: Path, seed: int) -> dict[str, Any]:
    """The roles of a configuration; all run on one thread."""
    one = {"num_threads": 1}
    rate = {
        "learning_rate": recipe.learning_rate,
        "schedule": recipe.schedule,
        "warmup_steps": recipe.warmup_steps,
    }
    learner = {"backend": "fsdp", "options": {**rate, "adam_beta2": 0.95, **one}}
    frozen = {"kind": "trainer", "backend": "fsdp", "options": one}
    other = {"model": {"path": str(directory / f"{recipe.needs}-{seed}" / "model")}}
    parts = [{"backend": "math"}, {"backend": "format", "weight": 0.5, "options": {"pattern": "=", "match": "search"}}]
    known: dict[str, dict[str, Any]] = {
        "trainer": {"trainer": {"kind": "trainer", **learner}},
        "scorer": {"trainer": {"kind": "trainer", "head": "reward", **learner}},
        "critic": {"critic": {"kind": "trainer", "head": "value", **learner}},
        "reference": {"reference": frozen},
        "teacher": {"teacher": frozen | other},
        "generator": {"generator": {"kind": "generator", "backend": "transformers", "options": one}},
        "reward": {"reward": {"kind": "reward", "backend": "math"}},
        "two_rewards": {"reward": {"kind": "reward", "parts": parts}},
        "learned_reward": {
            "scores": {**frozen, "head": "reward", **other},
            "reward": {"kind": "reward", "backend": "model", "uses": {"model": "scores"}},
        },
    }
    return {role: content for name in recipe.roles for role, content in known[name].items()}


def configuration(name: str, seed: int, directory: Path) -> dict[str, Any]:
    """The configuration of a run."""
    recipe, data = RECIPES[name], directory / "data"
    train, heldout = ("pairs", HELDOUT_PAIRS) if recipe.pairs else ("train", "heldout")
    kind = {"format": "preference"} if recipe.pairs else {}
    sources = [train, f"{recipe.needs}_pairs-{seed}"] if recipe.policy_pairs else [train]
    content: dict[str, Any] = {
        "name": f"{name}-{seed}",
        "output_dir": str(directory / f"{name}-{seed}"),
        "seed": seed,
        "model": {"path": str(directory / "sft" / "model")},
        "data": {
            "train": [{"path": str(data / f"{file}.jsonl"), "name": "arithmetic", **kind} for file in sources],
            "eval": [{"path": str(data / f"{heldout}.jsonl"), "name": "arithmetic", **kind}],
        },
        "algorithm": {"name": recipe.algorithm or name, "options": dict(recipe.options)},
        "roles": roles_of(recipe, directory, seed),
        "train": {"steps": recipe.steps, "prompts_per_step": recipe.batch, "mini_batches": recipe.mini_batches},
        "eval": {"at_start": recipe.pairs, "at_end": recipe.pairs},  # answers are judged afterwards, all alike
        "checkpoint": {"every": 10, "keep_last": 1},
        "log": {"progress": False, "rollouts": 16},
    }
    if recipe.filters:
        content["rollout"] = {"filters": [{"name": name} for name in recipe.filters]}
    if not recipe.pairs:
        content["sampling"] = {"max_tokens": 32, "temperature": 1.0}
    return content


def chatlearn(command: str, content: Mapping[str, Any], file: Path, *arguments: str) -> str:
    """Run a command of the command line, in a process of its own; its standard output.

    Raises:
        RuntimeError: it failed; the message ends with its output.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "chatlearn_cli.main", command, str(file), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"chatlearn {command} {file} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def summary_of(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a completed run; None if it is not there yet."""
    file = run_dir / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return summary if summary.get("status") == "completed" else None


def warm_start(directory: Path) -> None:
    """Make model, data, the warm start and the pairs that it samples, unless they are there."""
    data = directory / "data"
    if not (data / "sft.jsonl").exists():
        every = arithmetic.problems(["add"])
        splits = arithmetic.split_problems(every, validation=0, heldout=NUM_HELDOUT, seed=0)
        prompts = arithmetic.prompt_records(splits.heldout, "heldout", NUM_HELDOUT_PROMPTS, 0)
        write_records(data / "heldout.jsonl", prompts)
        write_records(data / "train.jsonl", arithmetic.prompt_records(splits.train, "train", NUM_TRAIN, 0))
        rows = arithmetic.prompt_records(splits.train, "pairs", NUM_PAIR_PROMPTS, 0)
        heldout_rows = arithmetic.prompt_records(splits.heldout, HELDOUT_PAIRS, NUM_HELDOUT_PAIR_PROMPTS, 0)
        write_records(data / "to_pair.jsonl", [*rows, *heldout_rows])
        demonstrations = arithmetic.demonstration_records(
            splits.train, "sft", SFT_STEPS * SFT_BATCH, 0, worked_shares=WORKED_SHARES
        )
        make_model(directory / "start", every)
        write_records(data / "sft.jsonl", demonstrations)
    if summary_of(directory / "sft") is None:
        options = {"learning_rate": 3e-3, "adam_beta2": 0.99, "schedule": "linear", "warmup_steps": 20}
        content = configuration("grpo", 0, directory) | {
            "name": "sft",
            "output_dir": str(directory / "sft"),
            "model": {"path": str(directory / "start")},
            "data": {"train": [{"path": str(data / "sft.jsonl"), "format": "sft", "name": "arithmetic"}]},
            "algorithm": {"name": "sft"},
            "roles": {
                "trainer": {
                    "kind": "trainer",
                    "backend": "fsdp",
                    "options": {**options, "min_lr_ratio": 0.1, "num_threads": 1},
                }
            },
            "train": {"steps": SFT_STEPS, "prompts_per_step": SFT_BATCH},
            "checkpoint": {"every": 0},
        }
        chatlearn("run", content, directory / "configs" / "sft.yaml")
    if not (data / "pairs.jsonl").exists():
        pairs, mark = list(sampled_pairs(directory, "to_pair", directory / "sampled")), f"/{HELDOUT_PAIRS}/"
        write_records(data / f"{HELDOUT_PAIRS}.jsonl", [pair for pair in pairs if mark in pair["id"]])
        write_records(data / "pairs.jsonl", [pair for pair in pairs if mark not in pair["id"]])


def make_model(directory: Path, problems: Sequence[arithmetic.Problem]) -> None:
    """A random Qwen3 of 0.2 million parameters; its tokenizer writes numbers digit by digit."""
    rng = random.Random(0)
    chats = [
        f"user\n{arithmetic.render(problem, rng)}\nassistant\n{arithmetic.solution(problem)}"
        for problem in rng.choices(problems, k=2000)
    ]
    build_tiny_model(
        directory,
        "qwen3",
        tokenizer=build_tiny_tokenizer(384, chats, extra_tokens=[*"0123456789", "\\boxed{"]),
        hidden=96,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate=256,
        initializer_range=0.05,
        seed=0,
    )


def policy_pairs(name: str, seed: int, directory: Path) -> None:
    """Make pairs that the model of a run sampled for training problems, unless they are there."""
    data = directory / "data"
    file, prompts = data / f"{name}_pairs-{seed}.jsonl", "policy_to_pair"
    if file.exists():
        return
    splits = arithmetic.split_problems(arithmetic.problems(["add"]), validation=0, heldout=NUM_HELDOUT, seed=0)
    write_records(
        data / f"{prompts}.jsonl", arithmetic.prompt_records(splits.train, "policy_pairs", NUM_PAIR_PROMPTS, 0)
    )
    model = directory / f"{name}-{seed}" / "model"
    write_records(file, list(sampled_pairs(directory, prompts, directory / f"sampled_{name}-{seed}", model)))


def sampled_pairs(directory: Path, prompts: str, run_dir: Path, model: Path | None = None) -> Iterator[dict[str, Any]]:
    """Up to ``PAIRS_PER_PROMPT`` pairs of a right and a wrong completion of each prompt, all different.

    ``model`` samples them, by default the warm start; ``prompts`` names a file of ``data``.
    """
    file = directory / "data" / f"{prompts}.jsonl"
    content = configuration("grpo", 0, directory) | {
        "output_dir": str(run_dir),
        "train": {"steps": 1, "prompts_per_step": len(file.read_text(encoding="utf-8").splitlines())},
        "checkpoint": {"every": 0, "export": False},
        "log": {"rollouts": 10**6, "progress": False},
    }
    content["data"]["train"][0]["path"] = str(file)
    if model is not None:
        content["model"] = {"path": str(model)}
    if summary_of(run_dir) is None:
        chatlearn("run", content, directory / "configs" / f"{run_dir.name}.yaml")
    rows = file.read_text(encoding="utf-8").splitlines()
    file = run_dir / "rollouts" / "step_000001.jsonl"  # sampled before the first update
    prompts = {row["id"]: row["prompt"] for row in map(json.loads, rows)}
    sampled: dict[str, tuple[dict[str, None], dict[str, None]]] = {name: ({}, {}) for name in prompts}
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if row["completion"]:  # an empty one cannot be learned from
            sampled[row["group"].partition("@")[0]][row["reward"] <= 0.5][row["completion"]] = None
    for name, (right, wrong) in sampled.items():
        num = min(PAIRS_PER_PROMPT, max(len(right), len(wrong))) if right and wrong else 0
        for index, (chosen, rejected) in enumerate(islice(zip(cycle(right), cycle(wrong), strict=True), num)):
            yield {"prompt": prompts[name], "chosen": chosen, "rejected": rejected, "id": f"{name}/{index}"}


def run(name: str, seed: int, directory: Path) -> str:
    """Make a run, unless it is finished; in one line, what happened."""
    run_dir = directory / f"{name}-{seed}"
    if summary_of(run_dir) is not None:
        return "finished before"
    if RECIPES[name].policy_pairs:
        policy_pairs(RECIPES[name].needs, seed, directory)
    chatlearn("run", configuration(name, seed, directory), directory / "configs" / f"{name}-{seed}.yaml")
    made = {**revision(), "date": today(), "recipe": recipe_hash(name)}
    (run_dir / "made.json").write_text(json.dumps(made), encoding="utf-8")
    return "finished"


def stages(wanted: Sequence[str]) -> list[list[str]]:
    """The wanted recipes and those that they need; a stage needs only models of the stages before it."""
    depths: dict[str, int] = {}

    def add(name: str) -> int:
        needs = RECIPES[name].needs
        depths[name] = add(needs) + 1 if needs else 0
        return depths[name]

    for name in wanted:
        add(name)
    return [[name for name in RECIPES if depths.get(name) == depth] for depth in sorted(set(depths.values()))]


def runs_of(name: str, directory: Path) -> list[Path]:
    """Directories of the runs of all seeds."""
    return sorted(directory.glob(f"{name}-[0-9]*"))


def judge(runs: Sequence[tuple[str, int]], directory: Path) -> None:
    """Write the held-out accuracy of the warm start and of the model of each run, unless it is there.

    All models answer the same prompts, in one process.
    """
    names = ["sft", *(f"{name}-{seed}" for name, seed in runs if name != "reward_model")]
    files = {str(directory / name / "model"): directory / name / HELDOUT_FILE for name in names}
    missing = [model for model, file in files.items() if not file.exists()]
    if not missing:
        return
    content = configuration("grpo", 0, directory) | {"output_dir": str(directory / "judged")}
    models = [argument for model in missing for argument in ("--model", model)]
    found = json.loads(chatlearn("eval", content, directory / "configs" / "judge.yaml", *models, "--json"))
    for one in found.get("evaluations") or [{"path": found["model"], "metrics": found}]:
        files[one["path"]].write_text(json.dumps(one["metrics"]["eval/accuracy"]), encoding="utf-8")


def result_of(name: str, seed: int, directory: Path) -> dict[str, Any] | None:
    """What a finished run reached; None without it.

    Returns:
        ``before`` and ``after``: held-out accuracy; of pairs also ``pairs`` and ``margin``, each before and after.
    """
    recipe, run_dir = RECIPES[name], directory / f"{name}-{seed}"
    summary = summary_of(run_dir)
    if summary is None or not (name == "reward_model" or (run_dir / HELDOUT_FILE).exists()):
        return None
    result: dict[str, Any] = {"name": name, "seed": seed, "wall_s": round(summary["wall_s"], 1)}
    result |= json.loads((run_dir / "made.json").read_text(encoding="utf-8"))
    if recipe.pairs:
        if "eval/margin" in summary:
            pairs = {"pairs": summary["eval/accuracy"], "margin": summary["eval/margin"]}
        else:  # kto, whose completions are no pairs
            good, bad = summary["eval/desirable_score"], summary["eval/undesirable_score"]
            pairs = {"margin": {when: good[when] - bad[when] for when in good}}
        result |= {key: [value["before"], value["after"]] for key, value in pairs.items()}
    if name != "reward_model":
        for when, place in (("before", directory / "sft"), ("after", run_dir)):
            result[when] = json.loads((place / HELDOUT_FILE).read_text(encoding="utf-8"))
    result["met"] = is_met(recipe, result)
    return result


def is_met(recipe: Recipe, result: Mapping[str, Any]) -> bool:
    """Whether a run reached what its recipe asks for."""
    answers = "before" not in result or result["after"] >= result["before"] + recipe.gain
    pairs = "pairs" not in result or result["pairs"][1] >= max(recipe.of_pairs, result["pairs"][0])
    return answers and pairs and ("margin" not in result or result["margin"][1] > result["margin"][0])


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def revision() -> dict[str, str]:
    """``commit`` and ``tree`` of the repository, with ``+`` where files differ from them.

    A commit that is rebased has another name, and the same tree where its files are the same.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = "+" if git("status", "--short") else ""
    return {
        "commit": git("rev-parse", "--short", "HEAD") + changed,
        "tree": git("rev-parse", "--short", "HEAD^{tree}") + changed,
    }


def spread(values: Sequence[float], form: str) -> str:
    """Mean and, of several, the range."""
    text = format(statistics.mean(values), form)
    return text if len(values) == 1 else f"{text} ({format(min(values), form)} .. {format(max(values), form)})"


def made_at(runs: Sequence[Mapping[str, Any]]) -> str:
    """Dates and trees of runs, and whether their recipe is another one today."""
    times = dict.fromkeys(f"{run['date']}, {run.get('tree') or 'tree not recorded'}" for run in runs)
    changed = any(run.get("recipe") != recipe_hash(run["name"]) for run in runs)
    return "; ".join(times) + (f" ({CHANGED})" if changed else "")


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for each algorithm; those without a finished run say so."""
    lines = [
        "| algorithm | seeds | accuracy before | after | asked gain | pairs before -> after | margin gain | met "
        "| date, tree |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, recipe in RECIPES.items():
        runs = [result for result in results if result["name"] == name]
        if not runs:
            lines.append(f"| `{name}` | not run | | | | | | | |")
            continue
        answers = [("", "", "")]
        if "after" in runs[0]:
            answers = [
                (
                    f"{runs[0]['before']:.0%}",
                    spread([r["after"] for r in runs], ".0%"),
                    f"{100 * recipe.gain:+.0f} points",
                )
            ]
        pairs = margin = ""
        if "pairs" in runs[0]:
            pairs = " -> ".join(spread([r["pairs"][i] for r in runs], ".0%") for i in (0, 1))
        if "margin" in runs[0]:
            margin = spread([r["margin"][1] - r["margin"][0] for r in runs], "+.2f")
        met = f"{sum(r['met'] for r in runs)} of {len(runs)}"
        cells = (*answers[0], pairs, margin, met, made_at(runs))
        lines.append(f"| `{name}` | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(results: Sequence[Mapping[str, Any]]) -> str:
    """SVG of held-out accuracy: the warm start, what each recipe asks for, and after training.

    A bar is the mean over seeds, a dot a seed; it is red where the seed did not reach what its recipe asks for.
    """
    names = [name for name in RECIPES if any(r["name"] == name and "after" in r for r in results)]
    width, left, top, row = 760, 170, 76, 24
    scale, bottom = width - left - 60, top + row * len(names)

    def x(accuracy: float) -> str:
        return f"{left + scale * accuracy:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 36}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18" font-weight="bold">Accuracy on held-out problems after training</text>',
        f'<rect x="{left}" y="30" width="18" height="10" fill="#9dc3e6"/>',
        f'<text x="{left + 24}" y="40" fill="#555">mean over seeds</text>',
        f'<circle cx="{left + 152}" cy="35" r="3" fill="#1f4e79"/>',
        f'<text x="{left + 160}" y="40" fill="#555">a seed</text>',
        f'<circle cx="{left + 222}" cy="35" r="3" fill="#c0392b"/>',
        f'<text x="{left + 230}" y="40" fill="#555">a seed that misses its target</text>',
        f'<path d="M{left + 434} 29V41" stroke="#777" stroke-width="2"/>',
        f'<text x="{left + 442}" y="40" fill="#555">target</text>',
    ]
    for tenth in range(0, 11, 2):
        parts.append(f'<path d="M{x(tenth / 10)} {top - 6}V{bottom}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x(tenth / 10)}" y="{bottom + 18}" text-anchor="middle" fill="#555">{tenth / 10:.0%}</text>'
        )
    for index, name in enumerate(names):
        runs, y = [r for r in results if r["name"] == name], top + row * index
        mean, asked = statistics.mean(r["after"] for r in runs), runs[0]["before"] + RECIPES[name].gain
        parts += [
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{y + 4}" width="{scale * mean:.1f}" height="{row - 8}" fill="#9dc3e6"/>',
            f'<path d="M{x(asked)} {y + 2}V{y + row - 2}" stroke="#777" stroke-width="2"/>',
            *(
                f'<circle cx="{x(r["after"])}" cy="{y + row / 2:.0f}" r="3" '
                f'fill="{"#1f4e79" if r["met"] else "#c0392b"}"/>'
                for r in runs
            ),
            f'<text x="{left + scale + 10}" y="{y + 16}">{mean:.0%}</text>',
        ]
    if names:
        before = next(r["before"] for r in results if "before" in r)
        parts.append(f'<path d="M{x(before)} {top - 6}V{bottom}" stroke="#333" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x(before)}" y="{top - 10}" text-anchor="middle">warm start {before:.0%}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/learning"), help="where runs and results are kept")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="runs at a time"
    )
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    warm_start(directory)
    wanted = [name for name in RECIPES if name in arguments.only]
    failed = 0
    with ThreadPoolExecutor(arguments.processes) as pool:
        for stage in stages(wanted):
            runs = {pool.submit(run, name, seed, directory): (name, seed) for seed in arguments.seeds for name in stage}
            for future in as_completed(runs):
                error = future.exception()
                failed += error is not None
                print(*runs[future], error or future.result(), flush=True)
    made = [(name, int(run_dir.name.rpartition("-")[2])) for name in RECIPES for run_dir in runs_of(name, directory)]
    finished = [(name, seed) for name, seed in made if summary_of(directory / f"{name}-{seed}") is not None]
    judge(finished, directory)
    results = (result_of(name, seed, directory) for name, seed in finished)
    found = [result for result in results if result is not None]
    record = {
        "benchmark": "learning",
        "met": not failed and all(result["met"] for result in found),
        "date": today(),
        **revision(),
        "runs": found,
        "machine": machine_facts(),
    }
    (directory / "table.md").write_text(table(found), encoding="utf-8")
    (directory / "learning.svg").write_text(plot(found), encoding="utf-8")
    (directory / "learning.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    print(json.dumps(record))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
