"""A model whose loader fuses two tensors of the checkpoint, which come in different buckets (DeepSeek)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chatlearn_core.exceptions import ConfigError
from chatlearn_hf.tiny import build_tiny_tokenizer
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, perturbed, read_checkpoint
from chatlearn_testing.suites.generator_fixtures import PROMPTS, ask


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tiny DeepSeek-V3."""
    target = tmp_path_factory.mktemp("deepseek_v3")
    tokenizer = build_tiny_tokenizer()
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        num_nextn_predict_layers=0,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={
            "rope_type": "yarn",  # the only kind that SGLang computes on a CPU
            "factor": 1.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "rope_theta": 10000.0,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def test_on_a_cpu_such_a_model_is_refused(start_engine, directory) -> None:
    with pytest.raises(ConfigError, match=r"roles\.actor: .* multi-head latent attention, .* \(deepseek_v3\)"):
        start_engine(directory)


@pytest.mark.engine
def test_halves_from_different_buckets_are_fused(start_engine, directory, tmp_path, monkeypatch) -> None:
    """Against the same weights loaded in one call, from a checkpoint: how the model computes does not matter here."""
    monkeypatch.setattr("chatlearn_sglang.generator.check_architecture", lambda config, role: None)
    engine = start_engine(directory)

    def sampled() -> tuple[list[list[int]], np.ndarray]:
        completions = engine.ask(*(ask(f"check-{i}", prompt) for i, prompt in enumerate(PROMPTS)))
        return [c.token_ids.tolist() for c in completions], np.concatenate([c.logprobs for c in completions])

    before = sampled()
    other = copy_with_weights(directory, perturbed(read_checkpoint(directory), seed=1), tmp_path / "other")
    tensors = read_checkpoint(other)
    names = sorted(tensors, key=lambda name: "kv_a_proj_with_mqa" in name)

    async def load() -> int:
        loader = engine.generator.loader
        await loader.begin(1, manifest_of(tensors))
        for start in range(0, len(names), 2):
            await loader.load_tensors((name, tensors[name]) for name in names[start : start + 2])
        return await loader.finish()

    assert engine.run(load()) == 1
    apart = sampled()
    engine.sync("checkpoint", other)
    whole = sampled()
    assert apart[0] == whole[0] != before[0]
    np.testing.assert_allclose(apart[1], whole[1], atol=1e-4)
