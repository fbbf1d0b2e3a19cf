"""Every example is a valid configuration, and those on real data run end to end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble, assemble_flow
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
GSM8K_ROW = {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
MATH_ROW = {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "level": "Level 1", "type": "Algebra"}


NEED_A_PACKAGE = {EXAMPLES / "custom_flow", EXAMPLES / "ctranslate2_generator"}
"""Their configurations need the package beside them: ``test_custom_flow.py`` and ``test_ctranslate2_generator.py`` run
them."""


@pytest.mark.parametrize(
    "file",
    sorted(file for file in EXAMPLES.rglob("*.yaml") if not NEED_A_PACKAGE & set(file.parents)),
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
    [
        ("gsm8k", "transformers"),
        ("math", "transformers"),
        ("gsm8k", "vllm"),
        pytest.param("gsm8k", "sglang", marks=pytest.mark.thorough),
    ],
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


TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL_CALLS = [
    '<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 21"}}</tool_call>',
    '<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>',
    '<tool_call>{"name": "python", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "browser", "arguments": {}}</tool_call>',
]


def model_that_calls_tools(directory: Path) -> Path:
    """A random model with a token for each of some tool calls, which it samples often, as it does the end of a turn."""
    tokenizer = build_tiny_tokenizer(extra_tokens=TOOL_CALLS)
    tokenizer.chat_template = TOOLS_TEMPLATE
    model = build_tiny_model(directory, "qwen3", hidden=64, max_length=4096, tie=False, tokenizer=tokenizer)
    weights = load_file(model / "model.safetensors")
    # The first dimension of the hidden state is large for every token, and counts only for the wanted ones.
    weights["model.embed_tokens.weight"][:, 0] = 10.0
    weights["lm_head.weight"][:, 0] = 0.0
    wanted = [*tokenizer.convert_tokens_to_ids(TOOL_CALLS), tokenizer.eos_token_id]
    weights["lm_head.weight"][wanted, 0] = 1.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.engine
@pytest.mark.slow
async def test_gsm8k_with_tools(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATLEARN_DATA", str(data))
    registry = discover_plugins()
    settings = [
        f"model.path={model_that_calls_tools(tmp_path / 'model')}",
        f"output_dir={tmp_path}/run",
        "train.steps=2",
        "train.prompts_per_step=2",
        "algorithm.options.group_size=4",
        "~data.eval.0",
        "data.max_prompt_tokens=1000",
        "sampling.max_tokens=16",
        "roles.tools.max_turns=3",
        "roles.trainer.options.num_threads=1",
    ]
    summary = await Run(assemble(load_config(EXAMPLES / "gsm8k_tools.yaml", settings, registry), registry)).train()
    assert summary["status"] == "completed"
    assert summary["totals"]["samples/trained"] == summary["totals"]["samples/total"] == 2 * 2 * 4
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        # The trainer's forward over whole conversations against what the generator said in each turn.
        assert line["mismatch/logprob_diff_max"] < 1e-4
        assert line["environment/tool_calls"] > 0
        assert line["environment/turns"] > 1
        assert line["environment/tool_errors"] == line["environment/tool_timeouts"] == 0
    assert sum(line["environment/unknown_tools"] + line["environment/bad_arguments"] for line in lines) > 0
    rows = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text()
    assert "browser" in rows


@pytest.mark.engine
@pytest.mark.slow
async def test_arithmetic_with_correction(tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {n} plus {n}?", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    registry = discover_plugins()
    settings = [
        f"model.path={build_tiny_model(tmp_path / 'model')}",
        f"output_dir={tmp_path}/run",
        f"data.train.0.path={tmp_path}/sums.jsonl",
        f"data.eval.0.path={tmp_path}/sums.jsonl",
        "train.steps=2",
        "train.prompts_per_step=2",
        "algorithm.options.group_size=4",
        "sampling.max_tokens=4",
    ]
    loaded = load_config(EXAMPLES / "arithmetic_correction.yaml", settings, registry)
    summary = await Run(assemble(loaded, registry)).train()
    assert summary["status"] == "completed"
    assert summary["totals"]["samples/trained"] + summary["totals"]["samples/excluded"] == 16
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "environment/turns" in line]
    assert len(steps) == 2
    assert all(1 < line["environment/turns"] <= 3 for line in steps)
    differences = [line["mismatch/logprob_diff_max"] for line in lines if "mismatch/logprob_diff_max" in line]
    assert max(differences) < 1e-4
