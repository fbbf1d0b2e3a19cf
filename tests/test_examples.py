"""Every example is a valid configuration, and those on real data run end to end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble, assemble_flow
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_hf.tiny import build_tiny_model

EXAMPLES = Path(__file__).parent.parent / "examples"
GSM8K_ROW = {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
MATH_ROW = {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "level": "Level 1", "type": "Algebra"}


NEEDS_A_PACKAGE = EXAMPLES / "custom_flow"
"""Its configurations need the package beside them: ``test_custom_flow.py`` runs them."""


@pytest.mark.parametrize(
    "file",
    sorted(file for file in EXAMPLES.rglob("*.yaml") if NEEDS_A_PACKAGE not in file.parents),
    ids=lambda file: file.stem,
)
def test_every_example_is_valid(file: Path) -> None:
    registry = discover_plugins()
    assert assemble_flow(load_config(file, (), registry), registry).plan.roles


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


SGLANG = os.environ.get("CHATLEARN_SGLANG_PYTHON", str(EXAMPLES.parent / ".venv-sglang" / "bin" / "python"))
ENGINES = {
    "transformers": ["roles.generator.backend=transformers"],
    "vllm": [
        "roles.generator.backend=vllm",
        "roles.generator.engine={max_model_len: 1024, max_num_seqs: 16, kv_cache_memory_bytes: 67108864}",
    ],
    "sglang": ["roles.generator.backend=sglang", f"roles.generator.options.python={SGLANG}"],
}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "generator"),
    [("gsm8k", "transformers"), ("math", "transformers"), ("gsm8k", "vllm"), ("gsm8k", "sglang")],
)
async def test_grpo_on_real_data(
    name: str, generator: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATLEARN_DATA", str(data))
    model = build_tiny_model(
        tmp_path / "model", "qwen3", hidden=128, max_length=1024
    )  # vLLM wants heads of 32 on a CPU
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
        *ENGINES[generator],
    ]
    loaded = load_config(EXAMPLES / f"{name}_grpo.yaml", settings, registry)
    summary = await Run(assemble(loaded, registry)).train()
    assert summary["status"] == "completed"
    assert summary["totals"]["samples/total"] == 2 * 2 * 8
    assert summary["totals"]["samples/trained"] + summary["totals"]["samples/excluded"] == 32
    assert summary["eval/samples"]["after"] > 0
    assert {"before", "after"} == summary["eval/accuracy"].keys()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [line["mismatch/logprob_diff_max"] for line in lines if "mismatch/logprob_diff_max" in line]
    assert len(differences) == 2
    assert max(differences) < 1e-4, "the generator holds the trainer's weights, in float32"
