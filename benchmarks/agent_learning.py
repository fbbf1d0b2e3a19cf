"""Does a policy learn to act over several turns? Held-out accuracy before and after training, by seed.

Two tasks, each GRPO on the arithmetic word problems of `learning.py` with a Qwen3 of 0.2 million parameters:

- `correction`: the environment `correction` says "That is wrong. Try again." after a wrong answer; three attempts. The
  warm start is that of `learning.py`.
- `agent`: an agent of the OpenAI Agents SDK with a calculator (`calculator_agent.py`), trained as it is through the
  gateway. Its warm start answers most questions from memory, mostly wrongly, and calls the calculator for the others.

A run is a directory: finished ones are kept, and a run that was stopped resumes.

    python benchmarks/agent_learning.py                                    # both tasks, three seeds
    python benchmarks/agent_learning.py --tasks correction --seeds 0

The task `agent` needs the package openai-agents. Aim: held-out accuracy rises in every run, by 0.1 or more. Prints one
JSON line last, and writes it to ``agent_learning.json`` in ``--directory``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import learning
from machine import installed_version, machine_facts

from chatlearn_data import arithmetic
from chatlearn_data.output import write_records
from chatlearn_hf.tiny import TOOLS_TEMPLATE, build_tiny_model, build_tiny_tokenizer

AIM = 0.1
CALLING_SHARE = 0.3
"""Demonstrations that call the calculator; the others answer from memory."""
SFT_STEPS, SFT_BATCH, NUM_TRAIN = 300, 24, 2000


def correction(seed: int, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration of a run with the environment ``correction``."""
    return {
        **environment(seed, directory, arguments, "correction"),
        "sampling": {"max_tokens": 32, "temperature": 1.0},
    }


def agent(seed: int, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration of a run with the environment ``agent``."""
    content = environment(seed, directory, arguments, "agent")
    content["model"] = {"path": str(directory / "agent" / "sft" / "model")}
    content["sampling"] = {"max_tokens": 48, "temperature": 1.0}
    return content


ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "correction": {"backend": "correction", "options": {"max_attempts": 3, "discount": 0.8}},
    "agent": {
        "backend": "agent",
        "timeout_s": 120.0,
        "max_turns": 3,
        "options": {"function": "calculator_agent:solve", "reward": "agent"},
    },
}
TASKS = {"correction": correction, "agent": agent}


def environment(seed: int, directory: Path, arguments: argparse.Namespace, task: str) -> dict[str, Any]:
    """A GRPO run whose rollouts are made by the environment of a task."""
    content = learning.configuration("grpo", seed, directory)
    options = {"group_size": 8, "roles": {"environment": task, "reward": None}}
    roles = {name: content["roles"][name] for name in ("trainer", "generator")}
    content |= {
        "name": f"{task}-{seed}",
        "output_dir": str(directory / f"{task}-{seed}"),
        "algorithm": {"name": "grpo", "options": options},
        "roles": roles | {task: {"kind": "environment", "uses": {"policy": "generator"}, **ENVIRONMENTS[task]}},
        "eval": {"at_start": True, "at_end": True, "every": arguments.every},
    }
    content["roles"]["trainer"]["options"]["learning_rate"] = arguments.learning_rate
    content["train"] |= {"steps": arguments.steps}
    content["data"]["eval"][0]["limit"] = arguments.heldout
    return content


def agent_warm_start(directory: Path) -> None:
    """Make the model and the warm start of the task ``agent``, unless they are there."""
    from calculator_agent import tool_schema

    place = directory / "agent"
    if learning.summary_of(place / "sft") is not None:
        return
    splits = arithmetic.split_problems(arithmetic.problems(["add"]), validation=0, heldout=learning.NUM_HELDOUT, seed=0)
    rows = list(demonstrations(splits.train, tool_schema()))
    tokenizer = build_tiny_tokenizer(384, [text for row in rows for text in texts(row)], extra_tokens=[*"0123456789"])
    tokenizer.chat_template = TOOLS_TEMPLATE
    build_tiny_model(
        place / "start",
        tokenizer=tokenizer,
        hidden=96,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate=256,
        max_length=768,
        initializer_range=0.05,
    )
    write_records(place / "sft.jsonl", rows)
    options = {"learning_rate": 3e-3, "adam_beta2": 0.99, "schedule": "linear", "warmup_steps": 20}
    trainer = {"kind": "trainer", "backend": "fsdp", "options": {**options, "min_lr_ratio": 0.1, "num_threads": 1}}
    content = learning.configuration("grpo", 0, directory) | {
        "name": "agent-sft",
        "output_dir": str(place / "sft"),
        "model": {"path": str(place / "start")},
        "data": {"train": [{"path": str(place / "sft.jsonl"), "format": "sft"}]},
        "algorithm": {"name": "sft"},
        "roles": {"trainer": trainer},
        "train": {"steps": SFT_STEPS, "prompts_per_step": SFT_BATCH},
        "checkpoint": {"every": 0},
    }
    learning.chatlearn("run", content, directory / "configs" / "agent-sft.yaml")


def demonstrations(members: Sequence[arithmetic.Problem], tool: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the format ``sft``: some call the calculator and repeat its result, the others answer at once."""
    draw = random.Random(0)
    for index in range(SFT_STEPS * SFT_BATCH):
        problem = draw.choice(members)
        question = {"role": "user", "content": arithmetic.render(problem, draw)}
        answer = {"role": "assistant", "content": str(problem.answer)}
        arguments = {"expression": f"{problem.left}+{problem.right}"}
        call = {
            "id": f"call{index:05d}",
            "type": "function",
            "function": {"name": "calculator", "arguments": arguments},
        }
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": str(problem.answer)}
        turns = [calling, result, answer] if draw.random() < CALLING_SHARE else [answer]
        yield {"id": f"sft/{index}", "prompt": [question], "completion": turns, "tools": [dict(tool)]}


def texts(row: Mapping[str, Any]) -> Iterator[str]:
    """Texts of a row, as the tokenizer learns its merges from them."""
    yield json.dumps(row["tools"][0])
    for message in (*row["prompt"], *row["completion"]):
        yield f"{message['role']}\n{message['content']}"
        for call in message.get("tool_calls", ()):
            yield f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"


def result_of(task: str, seed: int, directory: Path) -> dict[str, Any]:
    """``curve``: pairs of samples trained on and held-out accuracy; other metrics in the first and the last step."""
    file = directory / f"{task}-{seed}" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    trained, curve = 0, []
    for line in lines:
        trained += line.get("samples/trained", 0)
        if "eval/accuracy" in line:
            curve.append([trained, round(line["eval/accuracy"], 4)])
    steps = [line for line in lines if line["step"] > 0]
    found: dict[str, Any] = {"seed": seed, "curve": curve}
    for name in ("environment/turns", "environment/requests", "samples/excluded", "mismatch/prob_diff_max"):
        if any(name in line for line in steps):
            found[name] = [round(line[name], 5) for line in (steps[0], steps[-1]) if name in line]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/agent_learning"), help="where runs are kept")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15, help="of 128 rollouts each")
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--heldout", type=int, default=200, help="held-out prompts")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    learning.warm_start(directory)
    if "agent" in arguments.tasks:
        agent_warm_start(directory)
    found: dict[str, list[dict[str, Any]]] = {task: [] for task in arguments.tasks}
    for seed in arguments.seeds:
        for task in arguments.tasks:
            content = TASKS[task](seed, directory, arguments)
            if learning.summary_of(Path(content["output_dir"])) is None:
                learning.chatlearn("run", content, directory / "configs" / f"{content['name']}.yaml")
            result = result_of(task, seed, directory)
            found[task].append(result)
            curve = "  ".join(f"{samples:.0f}: {accuracy:.3f}" for samples, accuracy in result["curve"])
            print(f"{task:<12}seed {seed}  {curve}", flush=True)
    gains = {
        task: [round(one["curve"][-1][1] - one["curve"][0][1], 4) for one in results] for task, results in found.items()
    }
    record = {
        "benchmark": "agent_learning",
        "gain": {task: round(statistics.mean(values), 4) for task, values in gains.items()},
        "gain_by_seed": gains,
        "aim": f"held-out accuracy rises by at least {AIM} in every run",
        "met": all(value >= AIM for values in gains.values() for value in values),
        "runs": found,
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "heldout": arguments.heldout,
        "openai_agents": installed_version("openai-agents"),
        "date": learning.today(),
        **learning.revision(),
        "machine": machine_facts(),
    }
    (directory / "agent_learning.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
