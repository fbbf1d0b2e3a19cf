from __future__ import annotations

import numpy as np
import pytest
import torch

from chatlearn_transformers.decoder import Decoder

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("fused", [True, False])
def test_logits_equal_an_uncached_forward(fused, model_dir, load_model):
    plain, model = load_model(model_dir()), load_model(model_dir())
    decoder = Decoder(model, fused_attention=fused)
    draw = np.random.default_rng(0)
    sequences = [draw.integers(3, 300, length) for length in (9, 40, 3)]
    split = [6, 33, 1]  # prompts of unequal length; decoding passes a multiple of the cache's column step

    def expected(row, position):
        with torch.no_grad():
            return plain(input_ids=torch.from_numpy(sequences[row])[None]).logits[0, position]

    contexts = [ids[:length] for ids, length in zip(sequences, split, strict=True)]
    logits = decoder.prefill(contexts, np.array([0, 1, 2, 1]), 0)
    for row, source in enumerate((0, 1, 2, 1)):
        torch.testing.assert_close(logits[row], expected(source, split[source] - 1), atol=2e-4, rtol=0)
    for step in range(2):
        lengths = np.array([length + step for length in split])
        tokens = np.array([ids[length] for ids, length in zip(sequences, lengths, strict=True)])
        logits = decoder.decode(tokens, lengths)
        for row in range(3):
            torch.testing.assert_close(logits[row], expected(row, lengths[row]), atol=2e-4, rtol=0)


def test_kv_bytes_per_token_is_what_the_cache_takes(model_dir, load_model):
    decoder = Decoder(load_model(model_dir()), fused_attention=False)
    decoder.prefill([np.array([5, 6])] * 2, np.array([0, 1]), 0)
    assert decoder.cache.num_bytes == 2 * 32 * decoder.kv_bytes_per_token
