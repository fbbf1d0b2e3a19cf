"""Models that keep a state of their own, through the generator, against plain transformers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_transformers.sequential_decoder import SequentialDecoder

pytestmark = pytest.mark.engine

MODELS = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 12, "num_layers": 2},
    "mamba": {"state_size": 4, "time_step_rank": 2},
    "rwkv": {"attention_hidden_size": 64},  # returns a new state instead of changing the one it got
    "bloom": {"n_head": 4, "n_layer": 2},
}


@pytest.mark.parametrize("family", MODELS)
async def test_tokens_and_logprobs_equal_plain_transformers(
    family, model_dir, make_generator, load_model, random_prompts, ask, plain_logits
):
    directory = model_dir(family, **MODELS[family])
    # Groups of two, more requests than slots, and a KV cache that is dropped on the way.
    prompts = [prompt for prompt in random_prompts(3, seed=1, longest=20) for _ in range(2)]
    generator = make_generator(directory, max_num_sequences=4, max_length=128)
    assert isinstance(generator._decoder, SequentialDecoder)
    tasks = [
        asyncio.create_task(generator.generate(ask(str(i), p, seed=i, max_tokens=9 + 2 * i)))
        for i, p in enumerate(prompts)
    ]
    while generator._scheduler.num_running < 4:
        await asyncio.sleep(0)
    await generator.pause()
    assert generator.live_bytes("kv_cache") > 0
    generator.offload({"weights", "kv_cache"})
    assert generator.live_bytes("kv_cache") == 0
    generator.onload({"weights", "kv_cache"})
    await generator.resume()
    found = await asyncio.gather(*tasks)
    assert found[1].num_cached_tokens == len(prompts[1]), "a prompt that two began with was computed once"
    model = load_model(directory)
    for prompt, completion in zip(prompts, found, strict=True):
        logits = plain_logits(model, prompt, completion.token_ids).double()
        tokens = torch.from_numpy(completion.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(-1, tokens)[:, 0]
        np.testing.assert_allclose(completion.raw_logprobs, raw, atol=2e-5)


def test_rows_are_continuations_of_their_own(model_dir):
    model = load_causal_lm(str(model_dir("mamba", **MODELS["mamba"])), attention="eager")
    decoder = SequentialDecoder(model, fused_attention=False)
    first, second = np.array([5, 6, 7]), np.array([9, 8])
    decoder.prefill([first, second], np.array([0, 0, 1]), 0)
    one_cache = decoder.cache.num_bytes // 3
    assert one_cache > 0, "equal prompts have caches of their own"
    assert decoder.kv_bytes_per_token >= one_cache // 3
    lengths = np.array([3, 3, 2])
    left, right, other = decoder.decode(np.array([10, 11, 12]), lengths)
    expected = [decoder.own_logits(np.append(ids, token), len(ids))[0] for ids, token in ((first, 10), (first, 11))]
    torch.testing.assert_close(left, expected[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(right, expected[1], atol=1e-4, rtol=0)
    # The last row takes the place of the first, which has ended.
    decoder.move_rows(np.array([2]), np.array([0]), 3)
    again = decoder.decode(np.array([13, 14]), np.array([3, 4]))
    torch.testing.assert_close(again[0], decoder.own_logits(np.array([9, 8, 12, 13]), 3)[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(again[1], decoder.own_logits(np.array([5, 6, 7, 11, 14]), 4)[0], atol=1e-4, rtol=0)
    assert other.shape == left.shape
