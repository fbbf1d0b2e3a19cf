"""Steps of a prepared workload through TRL's GRPOTrainer or SFTTrainer; run by an interpreter that has TRL, alone.

    .venv-trl/bin/python benchmarks/trl_steps.py MODEL DATA RUN_DIR '{"steps": 4, ...}'

prints one JSON line of the same shape as ``grpo_steps.py``. Imports nothing of ChatLearn.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

KIB = 1024
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def last_number_is_right(completions: Sequence[str], ground_truth: Sequence[str], **columns: Any) -> list[float]:
    """1 where the last number of a completion is the truth: what ChatLearn's reward ``gsm8k`` does."""
    rewards = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        numbers = NUMBER.findall(completion)
        rewards.append(float(bool(numbers) and numbers[-1].replace(",", "") == truth))
    return rewards


def common_arguments(run_dir: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of both trainers: nothing but training."""
    return {
        "output_dir": run_dir,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_steps": settings["steps"],
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def trained(trainer: Any, num_steps: int, tokens: Callable[[], float]) -> list[dict[str, float]]:
    """Train; returns seconds of wall and CPU time of every step, and its ``tokens`` (a count that grows)."""
    from transformers import PrinterCallback, TrainerCallback

    class Recorder(TrainerCallback):
        def __init__(self) -> None:
            self.clocks: list[tuple[float, float, float]] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.clocks.append((time.perf_counter(), time.process_time(), tokens()))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.clocks.append((time.perf_counter(), time.process_time(), tokens()))

    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if len(recorder.clocks) != num_steps + 1:
        raise RuntimeError(f"TRL made {len(recorder.clocks) - 1} optimizer steps, not {num_steps}")
    names = ("wall_s", "cpu_s", "perf/tokens")
    return [
        dict(zip(names, (after - before for before, after in zip(*pair, strict=True)), strict=True))
        for pair in pairwise(recorder.clocks)
    ]


def rows_of(data: str) -> list[dict[str, Any]]:
    """The rows of a workload's file."""
    return [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]


def sft_steps(model: str, data: str, run_dir: str, settings: Mapping[str, Any]) -> list[dict[str, float]]:
    """Steps of supervised fine-tuning on the completions, in packed or in padded rows."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=settings["accumulation"],
        packing=settings["packing"],
        max_length=settings["row_tokens"],
        completion_only_loss=True,
        **common_arguments(run_dir, settings),
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model),
        args=arguments,
        train_dataset=Dataset.from_list([{key: row[key] for key in ("prompt", "completion")} for row in rows_of(data)]),
    )
    return trained(trainer, settings["steps"], lambda: float(trainer._total_train_tokens))


def grpo_steps(model: str, data: str, run_dir: str, settings: Mapping[str, Any]) -> list[dict[str, float]]:
    """Steps of GRPO."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokens = settings["completion_tokens"]
    arguments = GRPOConfig(
        per_device_train_batch_size=settings["samples"] // settings["accumulation"],
        gradient_accumulation_steps=settings["accumulation"],
        num_generations=settings["group_size"],
        num_iterations=1,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens} if settings["fixed_length"] else None,
        use_transformers_continuous_batching=settings["continuous_batching"],
        shuffle_dataset=False,
        **common_arguments(run_dir, settings),
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=last_number_is_right,
        args=arguments,
        train_dataset=Dataset.from_list(rows_of(data)),
    )
    steps = trained(trainer, settings["steps"], lambda: float(trainer.state.num_input_tokens_seen))
    [length] = [entry["completions/mean_length"] for entry in trainer.state.log_history if "step_time" in entry]
    return [step | {"response_length/mean": length} for step in steps]


def trl_steps(model: str, data: str, run_dir: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train; returns one dictionary of metrics a step, and the process's peak memory."""
    train = sft_steps if settings["method"] == "sft" else grpo_steps
    steps = train(model, data, run_dir, settings)
    return {"steps": steps, "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB}


if __name__ == "__main__":
    print(json.dumps(trl_steps(*sys.argv[1:4], json.loads(sys.argv[4]))))
