"""The work that the benchmarks time: a small Qwen3 from scratch and arithmetic word problems, made from a seed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from chatlearn_data.arithmetic import problems, prompt_records, solution, vocabulary
from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer

DRAW_SEED = 7
MOST_PROBLEMS = 12
"""In one demonstration, which has at least one: so lengths differ by a factor of ten."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One step's work, with one optimizer update. ``grpo``: ``prompts`` x ``group_size`` completions of
    ``completion_tokens`` each; ``sft``: ``prompts`` demonstrations of uneven lengths.
    """

    name: str
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    prompts: int = 48
    group_size: int = 8
    completion_tokens: int = 32
    """Exactly this many where ``fixed_length``, else at most."""
    fixed_length: bool = False
    learning_rate: float = 1e-4
    method: Literal["grpo", "sft"] = "grpo"

    @property
    def samples(self) -> int:
        """Completions or demonstrations a step."""
        return self.prompts * (self.group_size if self.method == "grpo" else 1)

    def prepare(self, directory: Path, steps: int) -> PreparedWorkload:
        """Write the model, and one JSONL row for every prompt of ``steps`` steps: id, prompt text, and ground truth or
        completion.
        """
        rows = list(prompt_records(problems(), "train", self.prompts * steps, DRAW_SEED))
        texts = [f"{row['prompt'][0]['content']} Answer: " for row in rows]
        corpus = [*texts, *(solution(problem) for problem in problems())]
        model = build_tiny_model(
            directory / "model",
            "qwen3",
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads // 2,
            intermediate=3 * self.hidden,
            tokenizer=build_tiny_tokenizer(512, corpus, extra_tokens=[n for n in vocabulary() if n.isdigit()]),
            initializer_range=0.02,
        )
        data = directory / "prompts.jsonl"
        with data.open("w", encoding="utf-8") as file:
            for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
                record = {"id": row["id"], "prompt": text}
                if self.method == "sft":
                    more = problems()[index :: self.prompts * steps][: index % MOST_PROBLEMS]
                    record["completion"] = " ".join(solution(problem) for problem in (problems()[-1], *more))
                else:
                    # The policy is untrained: a truth that it hits now and then gives groups whose rewards differ.
                    record["ground_truth"] = "7"
                file.write(json.dumps(record) + "\n")
        return PreparedWorkload(self, model, data, steps)


@dataclass(frozen=True, slots=True)
class PreparedWorkload:
    """A workload on disk."""

    workload: Workload
    model: Path
    data: Path
    steps: int

    def settings(self) -> dict[str, Any]:
        """What ``grpo_steps.py`` and ``trl_steps.py`` take, as plain values."""
        return asdict(self.workload) | {"samples": self.workload.samples, "steps": self.steps}

    @property
    def parameters(self) -> int:
        """Numbers in the model's weight files, tied weights once."""
        total = 0
        for file in sorted(self.model.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in list(tensors.keys()))
        return total
