"""Models with windows, caps or scales: through the generator, past the window, against plain transformers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.engine

MIXED = ["sliding_attention", "full_attention"]
MODELS = {
    "gemma2": {
        "sliding_window": 9,
        "layer_types": MIXED,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {"sliding_window": 9, "layer_types": MIXED},
    "mistral": {"sliding_window": 9},
    "phi3": {"sliding_window": 9},
    "gpt_oss": {"sliding_window": 9, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
    "llama4_text": {"attention_chunk_size": 9, "num_local_experts": 2, "interleave_moe_layer_step": 2},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MODELS)
async def test_tokens_and_logprobs_equal_plain_transformers(
    family, attention, model_dir, make_generator, load_model, random_prompts, ask, plain_logits
):
    directory = model_dir(family, **MODELS[family])
    # Prompts shorter than the window and up to three times as long, two of them twice; four slots for eight requests.
    prompts = random_prompts(6, seed=1, longest=27)
    prompts += prompts[:2]
    generator = make_generator(directory, attention=attention, max_num_sequences=4)
    found = await asyncio.gather(
        *(
            generator.generate(ask(str(i), p, temperature=0.0, max_tokens=9 + 2 * i, ignore_eos=False))
            for i, p in enumerate(prompts)
        )
    )
    model = load_model(directory)
    for index, (prompt, completion) in enumerate(zip(prompts, found, strict=True)):
        expected = model.generate(
            input_ids=torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=9 + 2 * index, pad_token_id=0
        )[0, len(prompt) :]
        assert completion.token_ids.tolist() == expected.tolist()
        logits = plain_logits(model, prompt, completion.token_ids).double()
        tokens = torch.from_numpy(completion.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(-1, tokens)[:, 0]
        np.testing.assert_allclose(completion.raw_logprobs, raw, atol=1e-5)


async def test_a_window_is_exact_over_offload_and_slots_that_change_hands(
    model_dir, make_generator, load_model, random_prompts, ask, plain_logits
):
    directory = model_dir("gemma3_text", **MODELS["gemma3_text"])
    generator = make_generator(directory, max_num_sequences=3)
    prompts = random_prompts(5, seed=2, longest=20)
    tasks = [
        asyncio.create_task(generator.generate(ask(str(i), p, seed=i, max_tokens=6 + 7 * i)))
        for i, p in enumerate(prompts)
    ]
    while generator._scheduler.num_running < 3:
        await asyncio.sleep(0)
    for _ in range(4):
        await generator.pause()
        generator.offload({"weights", "kv_cache"})
        generator.onload({"weights", "kv_cache"})
        await generator.resume()
        await asyncio.sleep(0.005)
    model = load_model(directory)
    for prompt, completion in zip(prompts, await asyncio.gather(*tasks), strict=True):
        logits = plain_logits(model, prompt, completion.token_ids).double()
        tokens = torch.from_numpy(completion.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(-1, tokens)[:, 0]
        np.testing.assert_allclose(completion.raw_logprobs, raw, atol=1e-5)
