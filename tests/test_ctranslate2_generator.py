"""The package ``examples/ctranslate2_generator``, built as a wheel and installed apart: the kit checks it as it checks
an author's plugin, and it trains with the trainer ``fsdp``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from chatlearn_hf.plain_forward import load_plain_model
from chatlearn_hf.tiny import build_tiny_model

EXAMPLE = Path(__file__).parent.parent / "examples" / "ctranslate2_generator"

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package and nothing else."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("ctranslate2-generator")
    build = ["hatchling", "build", "-t", "wheel", "-d", wheels]
    pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index", "--target", folder]
    for command in (build, [*pip, wheels / "ctranslate2_generator-1.0-py3-none-any.whl"]):
        subprocess.run([sys.executable, "-m", *map(str, command)], cwd=EXAMPLE, check=True, capture_output=True)
    return folder


@pytest.mark.timeout(900)  # the whole suite of generators, on a machine full of engines
def test_the_kit_certifies_it(chatlearn: Any, installed: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    checked = chatlearn("plugins", "check", "ctranslate2-generator", "--output", result, PYTHONPATH=str(installed))
    assert checked.code == 0, checked.output
    [suite] = [check for check in json.loads(result.read_text())["checks"] if check["suite"] == "GeneratorConformance"]
    assert suite["passed"] > 60


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_its_logits_are_those_of_transformers(
    family: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3 is the suite's model."""
    ctranslate2 = pytest.importorskip("ctranslate2")  # with CI set, a skip of an engine's test is a failure
    monkeypatch.syspath_prepend(str(installed))
    from ctranslate2_generator.conversion import convert

    model = build_tiny_model(tmp_path / family, family, initializer_range=0.2)
    convert(model, tmp_path / "converted")
    engine = ctranslate2.Generator(str(tmp_path / "converted"), device="cpu", compute_type="float32")
    ids = list(range(5, 40, 3))
    logits = torch.from_numpy(np.array(engine.forward_batch([ids])))[0]
    with torch.no_grad():
        torch.testing.assert_close(logits, load_plain_model(model)(torch.tensor(ids)), atol=1e-4, rtol=1e-4)


def test_it_trains_with_fsdp(chatlearn: Any, installed: Path, tmp_path: Path) -> None:
    """Two steps from the example's configuration, on a tiny model and rows of its own."""
    settings = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    model = build_tiny_model(tmp_path / "model", "qwen3", initializer_range=0.2)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings |= {"model": {"path": str(model)}, "output_dir": str(tmp_path / "run")}
    settings["data"] = {name: [{"path": str(tmp_path / "rows.jsonl")}] for name in ("train", "eval")}
    settings["roles"]["reward"] = {
        "kind": "reward",
        "backend": "length",
        "options": {"unit": "characters", "target": 20, "band": 40},
    }
    settings["train"] = {"steps": 2, "prompts_per_step": 2}
    settings["eval"] = {"at_start": False}
    settings["sampling"] = {"max_tokens": 8, "temperature": 0.8}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    finished = chatlearn("run", file, PYTHONPATH=str(installed))
    assert finished.code == 0, finished.output
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in steps if "policy/grad_norm" in line]
    assert len(trained) == 2
    for line in trained:
        assert line["mismatch/prob_diff_mean"] < 1e-4, "the trainer's logprobs, of other weights after each sync"
        assert line["policy/grad_norm"] > 0
