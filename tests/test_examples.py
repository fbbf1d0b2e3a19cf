"""Every example is a valid configuration, and those on real data run end to end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_hf.tiny import build_tiny_model

EXAMPLES = Path(__file__).parent.parent / "examples"
GSM8K_ROW = {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
MATH_ROW = {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "level": "Level 1", "type": "Algebra"}


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_example_is_valid(file: Path) -> None:
    assert load_config(file).config.algorithm.name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real data where it is there, otherwise a few rows of the same shape."""
    real = os.environ.get("CHATLEARN_TEST_DATA")
    if real:
        return Path(real)
    directory = tmp_path_factory.mktemp("data")
    for name, row in (("gsm8k", GSM8K_ROW), ("math", MATH_ROW)):
        (directory / name).mkdir()
        for split in ("train", "test"):
            (directory / name / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    return directory


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "math"])
async def test_grpo_on_real_data(name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATLEARN_DATA", str(data))
    model = build_tiny_model(tmp_path / "model", "qwen3", max_length=1024)
    registry = discover_plugins()
    settings = [
        f"model.path={model}",
        f"output_dir={tmp_path}/run",
        "train.steps=2",
        "train.prompts_per_step=2",
        "data.eval.0.limit=8",
        "data.max_prompt_tokens=600",
        "sampling.max_tokens=16",
        "roles.trainer.options.num_threads=1",
    ]
    loaded = load_config(EXAMPLES / f"{name}_grpo.yaml", settings, registry)
    summary = await Run(assemble(loaded, registry)).train()
    assert summary["status"] == "completed"
    assert summary["totals"]["samples/total"] == 2 * 2 * 8
    assert summary["totals"]["samples/trained"] + summary["totals"]["samples/excluded"] == 32
    assert summary["eval/samples"]["after"] > 0
    assert {"before", "after"} == summary["eval/accuracy"].keys()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
