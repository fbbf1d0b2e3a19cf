"""A run directory made by hand, as the core writes them, with everything that a report has to cope with."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

GROUP_SIZE = 4
HOSTILE = "</script><script>document.title='stolen'</script><!-- <b>bold</b> &amp; \u2028 ]]>"


def metrics_line(step: int, *, evaluated: bool = False) -> dict[str, Any]:
    if step == 0:
        return {"step": 0, "eval/accuracy": 0.31, "eval/reward": 0.35, "eval/samples": 64}
    progress = 1 - math.exp(-step / 30)
    wobble = 0.06 * math.sin(step * 1.7) + 0.04 * math.sin(step * 0.37)
    line = {
        "step": step,
        "reward": 0.35 + 0.45 * progress + wobble,
        "reward_std": 0.4 - 0.15 * progress,
        "policy/entropy": 1.2 * math.exp(-step / 60) + 0.2,
        "policy/kl_loss": 0.002 * step + 0.001 * abs(wobble),
        "policy/ppo_kl": 1e-4 * (1 + wobble),
        "policy/pg_clipfrac": 0.01 + 0.02 * abs(wobble),
        "policy/grad_norm": "nan" if step == 5 else 1.5 + wobble,
        "policy/lr": 1e-3,
        "policy/pg_loss": -0.01 * wobble,
        "mismatch/prob_diff_mean": 1e-7 * (1 + abs(wobble)),
        "response_length/mean": 20 + 4 * wobble,
        "response_length/min": 3,
        "response_length/max": 32,
        "perf/throughput": 5200 + 900 * wobble,
        "samples/excluded": 1 if step % 9 == 4 else 0,
        "timing_s/generate": 0.40 + 0.1 * wobble,
        "timing_s/reward": 0.25,
        "timing_s/compute/reference": 0.08,
        "timing_s/compute/trainer": 0.09,
        "timing_s/advantages": 0.01,
        "timing_s/forward": 0.12,
        "timing_s/backward": 0.22,
        "timing_s/optimizer": 0.03,
        "timing_s/update": 0.40,
        "timing_s/sync": 0.03,
        "timing_s/step": 1.05 + 0.1 * wobble,
    }
    if evaluated:
        line |= {"eval/accuracy": 0.31 + 0.4 * progress, "eval/reward": 0.35 + 0.4 * progress, "timing_s/eval": 0.6}
    return line


def rollout_line(step: int, prompt: int, index: int, kind: str = "step") -> dict[str, Any]:
    right = (step + prompt + index) % 3 == 0
    text = f"{prompt + 20} plus {step} is \\boxed{{{prompt + 20 + step if right else prompt}}}"
    if step == 2 and prompt == 1 and index == 2:
        text = HOSTILE
    length = len(text)
    suffix = "@eval" if kind == "eval" else f"@{step}"
    line = {
        "step": step,
        "id": f"train/{prompt}{suffix}#{index}",
        "group": f"train/{prompt}{suffix}",
        "data_source": "sums" if prompt % 2 else "differences",
        "prompt": f"user: Anna has {prompt + 20} apples and buys {step} more.\nHow many has she?\nassistant:",
        "ground_truth": str(prompt + 20 + step),
        "completion": text,
        "finish_reason": "stop" if right else "length",
        "reward": float(right),
        "reward_components": {"math": float(right), "format": 0.5},
        "reward_error": None,
        "excluded": None,
        "token_ids": [ord(character) for character in text],
        "generator_logprobs": [-0.05 - (i * 7 % 11) * 0.4 for i in range(length)],
    }
    if kind == "step":
        line["trainer_logprobs"] = [value + 0.02 * math.sin(i) for i, value in enumerate(line["generator_logprobs"])]
        line["advantages"] = [1.15 if right else -0.58] * length
        if step == 4 and prompt == 0 and index == 1:
            line |= {"reward": None, "reward_error": "ValueError: no number", "excluded": "reward failed"}
            line["reward_components"] = {}
            del line["advantages"]
    return line


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def write_run(path: Path, steps: int = 6, prompts: int = 3) -> Path:
    """A complete run of ``steps`` steps, evaluated before and every third step."""
    (path / "rollouts").mkdir(parents=True)
    write_lines(
        path / "metrics.jsonl",
        [metrics_line(step, evaluated=step % 3 == 0 or step == steps) for step in range(steps + 1)],
    )
    for step in range(1, steps + 1):
        lines = [rollout_line(step, prompt, index) for prompt in range(prompts) for index in range(GROUP_SIZE)]
        write_lines(path / "rollouts" / f"step_{step:06d}.jsonl", lines)
    for step in (0, steps):
        lines = [rollout_line(step, prompt, 0, "eval") for prompt in range(prompts)]
        write_lines(path / "rollouts" / f"eval_{step:06d}.jsonl", lines)
    write_lines(
        path / "events.jsonl",
        [
            {"event": "data", "report": "train.jsonl: 3990 rows, 10 filtered (longer than 64 tokens)"},
            {"event": "resume", "note": "resuming after step 3"},
            {"event": "warning", "step": 4, "text": f"1 of 12 samples was excluded: {HOSTILE}"},
        ],
    )
    summary = {
        "name": "sums <grpo>",
        "status": "complete",
        "steps": steps,
        "planned_steps": steps,
        "eval/accuracy": {"before": 0.31, "after": 0.625},
        "totals": {"samples/total": 12.0 * steps, "samples/excluded": 1.0, "perf/trained_tokens": 4321.0},
        "best": {"step": steps, "eval/accuracy": 0.625},
        "model": str(path / "model"),
        "wall_s": 83.2,
        "error": None,
        "versions": {"chatlearn-core": "0.1.0", "python": "3.11.7"},
    }
    (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    config = {
        "name": "sums <grpo>",
        "model": {"path": "models/tiny", "tokenizer": None},
        "algorithm": {"name": "grpo"},
        "train": {"steps": steps},
        "sampling": {"stop": ["</script>"]},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    (path / "flow.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="400" height="60" viewBox="0 0 400 60">'
        '<rect x="10" y="10" width="160" height="40" rx="8" fill="#d9ecff" stroke="#445"/>'
        '<text x="90" y="35" text-anchor="middle">generator.generate</text>'
        '<rect x="220" y="10" width="160" height="40" rx="8" fill="#fff0cc" stroke="#445"/>'
        '<text x="300" y="35" text-anchor="middle">reward.score</text></svg>',
        encoding="utf-8",
    )
    return path


def made_timeline_line(step: int, seconds: float = 4.0, replicas: int = 2) -> dict[str, Any]:
    """A line of ``timeline.jsonl``: replica 0 samples for 4 s, each other one for 2 s."""
    sampling = [[[0.0, 4.0]], *[[[0.0, 1.0], [2.0, 3.0]]] * (replicas - 1)]
    return {
        "step": step,
        "time": 1.7e9 + 4 * step,
        "seconds": seconds,
        "waiting": [[0.0, 1.0]],
        "updating": [[1.0, 3.0]],
        "syncing": [[3.5, 4.0]],
        "generators": {"generator": sampling},
    }


@pytest.fixture
def timeline_line() -> Callable[..., dict[str, Any]]:
    return made_timeline_line


@pytest.fixture
def async_run_dir(run_dir: Path) -> Path:
    """A run whose rollouts were made ahead."""
    write_lines(run_dir / "timeline.jsonl", [made_timeline_line(step) for step in range(1, 7)])
    ages = {"rollout/staleness/0": 0.25, "rollout/staleness/1": 0.75}
    write_lines(run_dir / "metrics.jsonl", [metrics_line(step) | ages for step in range(1, 7)])
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer whose tokens are the characters, in place of the one that the run's model would have."""
    from chatlearn_observe.report import write

    def decode(ids: Any) -> str:
        return "".join(map(chr, ids))

    monkeypatch.setattr(write, "find_decoder", lambda *_: (decode, "characters"))


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[..., str]:
    """Runs headless Chromium on a file and gives what it prints; skips where none is installed."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("no Chromium is installed (chromium, chromium-browser or google-chrome)")

    def browse(page: Path, address: str = "", *arguments: str, action: str = "--dump-dom") -> str:
        command = [
            binary,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            "--virtual-time-budget=4000",
            f"--user-data-dir={tmp_path / 'browser'}",
            *arguments,
            action,
            page.as_uri() + address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    return browse
