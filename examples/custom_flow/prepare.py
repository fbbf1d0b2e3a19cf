"""Writes tiny random models and multiple-choice questions to runs/custom_flow, so that every configuration runs."""

import json
import random
from pathlib import Path

from chatlearn_hf.heads import load_model
from chatlearn_hf.tiny import build_tiny_model

ROOT = Path("runs/custom_flow")


def main() -> None:
    for seed, name in enumerate(("policy", "rival", "quality", "style")):
        build_tiny_model(ROOT / name, hidden=32, intermediate=64, seed=seed)
    for name in ("quality", "style"):  # reward models: sequence classifiers with one label
        load_model(str(ROOT / name), "reward").save_pretrained(ROOT / name)
    rng = random.Random(0)
    rows = []
    for number in range(48):
        left, right = rng.randint(1, 9), rng.randint(1, 9)
        choices = rng.sample([left + right, left + right + 1, left + right + 2, left * right + 20], 4)
        answer = choices.index(left + right)
        question = f"What is {left} plus {right}?"
        rows.append({"id": f"sum-{number}", "question": question, "choices": list(map(str, choices)), "right": answer})
    (ROOT / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
