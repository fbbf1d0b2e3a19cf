"""LoRA adapters: a sync brings an adapter, the base stays; against peft in plain transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import Completion, WeightManifest
from chatlearn_hf.plain_forward import PlainModel, load_plain_model
from chatlearn_hosting import SharedBlock
from chatlearn_sglang.options import LoraOptions
from chatlearn_testing.model_directory import manifest_of, read_checkpoint
from chatlearn_testing.suites.generator_fixtures import PROMPTS, ask, assert_completion, plain_greedy

pytestmark = pytest.mark.engine

Adapter = tuple[torch.nn.Module, dict[str, Any], dict[str, torch.Tensor]]

CASES = {
    "every layer, a rank below the largest": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "r": 4,
    },
    "parts of fused layers": {"target_modules": ["v_proj", "up_proj"], "r": 8},
    "rank-stabilised": {"target_modules": ["k_proj", "gate_proj", "o_proj"], "r": 2, "use_rslora": True},
}


@pytest.fixture(scope="module")
def directory(model_dir) -> Path:
    return model_dir()


@pytest.fixture(scope="module")
def engine(start_engine, directory):
    return start_engine(directory, lora=LoraOptions(max_rank=8))


@pytest.fixture
def make_adapter(directory, tmp_path):
    """``make_adapter(seed, **config)``: (peft model, its configuration, its tensors), far from zero."""

    def make(seed: int, **config: Any) -> Adapter:
        torch.manual_seed(seed)
        shape = LoraConfig(lora_alpha=16, init_lora_weights=False, **config)
        model = get_peft_model(load_plain_model(directory).model, shape)
        model.save_pretrained(tmp_path / str(seed))
        saved = json.loads((tmp_path / str(seed) / "adapter_config.json").read_text())
        return PlainModel(model).eval(), saved, load_file(tmp_path / str(seed) / "adapter_model.safetensors")

    return make


async def load(engine: Any, version: int, adapter: Adapter, channel: str, directory: Path) -> None:
    _, config, tensors = adapter
    loader = engine.generator.loader
    await loader.begin(version, WeightManifest(manifest_of(tensors).tensors, adapter=config))
    if channel == "tensors":
        items = list(tensors.items())
        await loader.load_tensors(items[::2])
        await loader.load_tensors(items[1::2])
    elif channel == "checkpoint":
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
        await loader.load_checkpoint(directory)
    elif channel == "process_group":
        await engine._by_process_group(directory, tensors)
    else:
        with SharedBlock(8192) as block:
            for handle in block.fill(tensors.items()):
                await loader.load_handles(handle)
    assert await loader.finish() == version


def served(engine, model: torch.nn.Module) -> list[list[int]]:
    """Greedy tokens, which are the model's under the engine's version, as are their logprobs."""
    requests = [ask(f"check-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    completions = engine.ask(*requests)
    for request, completion in zip(requests, completions, strict=True):
        assert completion.token_ids.tolist() == plain_greedy(model, request.prompt_ids.tolist())
        assert_completion(model, request, completion, engine.generator.policy_version)
    return [completion.token_ids.tolist() for completion in completions]


def test_each_sync_serves_the_new_adapter(engine, directory, make_adapter, tmp_path) -> None:
    seen = [served(engine, load_plain_model(directory))]
    channels = ("tensors", "memory_handles", "process_group", "checkpoint")
    configs = [*CASES.values(), next(iter(CASES.values()))]
    for version, (channel, config) in enumerate(zip(channels, configs, strict=True), start=1):
        adapter = make_adapter(version, **config)
        engine.run(load(engine, version, adapter, channel, tmp_path / "checkpoint"))
        seen.append(served(engine, adapter[0]))
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i]), "an adapter changes nothing"


def test_a_kept_request_continues_under_the_new_adapter(engine, make_adapter, tmp_path) -> None:
    generator, version = engine.generator, engine.generator.policy_version
    first, second = make_adapter(7, **CASES["rank-stabilised"]), make_adapter(8, **CASES["parts of fused layers"])
    engine.run(load(engine, version + 1, first, "tensors", tmp_path))

    async def interrupt() -> Completion:
        begun = asyncio.Event()
        task = asyncio.ensure_future(generator.generate(ask("kept", max_tokens=100), lambda start, tokens: begun.set()))
        await begun.wait()
        await load(engine, version + 2, second, "tensors", tmp_path)
        return await task

    old, new = (completion := engine.run(interrupt())).version_spans
    assert (old.version, new.version, new.stop) == (version + 1, version + 2, 100)
    tokens, prompt = completion.token_ids.tolist(), list(PROMPTS[0])
    assert tokens[: old.stop] == plain_greedy(first[0], prompt, old.stop)
    assert tokens[old.stop :] == plain_greedy(second[0], prompt + tokens[: old.stop], 100 - old.stop)


def test_an_unsupported_adapter_is_refused_before_any_transfer(engine, directory, make_adapter) -> None:
    generator, version = engine.generator, engine.generator.policy_version
    _, config, tensors = make_adapter(9, **CASES["parts of fused layers"])
    manifest = WeightManifest(manifest_of(tensors).tensors, adapter=config | {"r": 64})
    with pytest.raises(WeightSyncError, match=r"adapter of policy version \d+:\n  adapter_config.r: rank 64, above"):
        engine.run(generator.loader.begin(version + 1, manifest))
    with pytest.raises(WeightSyncError, match=r"set weight_sync\.payload to adapter, or remove options\.lora"):
        engine.run(generator.loader.begin(version + 1, manifest_of(read_checkpoint(directory))))
    assert (generator.state, generator.policy_version) == ("serving", version)
