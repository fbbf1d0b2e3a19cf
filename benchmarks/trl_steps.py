"""GRPO steps of a prepared workload through TRL's GRPOTrainer; run by an interpreter that has TRL, alone.

    .venv-trl/bin/python benchmarks/trl_steps.py MODEL DATA RUN_DIR '{"steps": 4, ...}'

prints one JSON line of the same shape as ``grpo_steps.py``. Imports nothing of ChatLearn.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
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


def trl_steps(model: str, data: str, run_dir: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train; returns one dictionary of metrics a step, and the process's peak memory."""
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Recorder(TrainerCallback):
        def __init__(self) -> None:
            self.clocks: list[tuple[float, float]] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.clocks.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.clocks.append((time.perf_counter(), time.process_time()))

    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    tokens = settings["completion_tokens"]
    arguments = GRPOConfig(
        output_dir=run_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=settings["steps"],
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
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    recorder = Recorder()
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=last_number_is_right,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds = [
        (wall[1] - wall[0], cpu[1] - cpu[0])
        for wall, cpu in (zip(*pair, strict=True) for pair in pairwise(recorder.clocks))
    ]
    if len(seconds) != settings["steps"]:
        raise RuntimeError(f"TRL made {len(seconds)} optimizer steps, not {settings['steps']}")
    [length] = [entry["completions/mean_length"] for entry in trainer.state.log_history if "step_time" in entry]
    return {
        "steps": [{"wall_s": wall, "cpu_s": cpu, "response_length/mean": length} for wall, cpu in seconds],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
    }


if __name__ == "__main__":
    print(json.dumps(trl_steps(*sys.argv[1:4], json.loads(sys.argv[4]))))
