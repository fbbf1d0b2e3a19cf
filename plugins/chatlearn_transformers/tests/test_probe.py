"""What the comparison before a run sees: each test breaks the computation in a way that it must catch."""

from __future__ import annotations

import pytest
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_transformers import attention, probe
from chatlearn_transformers.decoder import Decoder
from chatlearn_transformers.probe import check_decoder, compare_logits

LONG = {"max_length": 512, "sliding_window": 200}


@pytest.fixture
def make_decoder(model_dir):
    """``make_decoder(family, dtype, **config)``: not yet compared with anything."""

    def make(family="mistral", dtype=torch.float32, fused=True, **config):
        model = load_causal_lm(str(model_dir(family, **config)), dtype=dtype, attention="eager")
        return Decoder(model.requires_grad_(False), fused_attention=fused)

    return make


def without_windows(monkeypatch):
    """Decoding attends to all earlier tokens, as a cache would that knows no windows."""
    own = attention.slot_mask

    def causal(*args, **kwargs):
        if isinstance(kwargs.get("q_offset"), torch.Tensor):
            kwargs["mask_function"] = lambda row, head, query, key: key <= query
        return own(*args, **kwargs)

    monkeypatch.setitem(attention.AttentionMaskInterface._global_mapping, attention.NAME, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [{"sliding_window": 8}, LONG], ids=["short", "long"])
def test_a_window_that_is_ignored_while_decoding_is_seen(config, dtype, make_decoder, monkeypatch):
    check_decoder(make_decoder(dtype=dtype, **config), "m", 512)
    without_windows(monkeypatch)
    with pytest.raises(ModelError, match=r"cannot serve m \(model type 'mistral'\): .* logits differ"):
        check_decoder(make_decoder(dtype=dtype, **config), "m", 512)
    # No sequence is longer than the window, so it does not matter.
    check_decoder(make_decoder(dtype=dtype, **config), "m", config["sliding_window"])


def test_a_long_window_is_looked_at_in_the_first_layers_only(make_decoder, monkeypatch):
    decoder = make_decoder("gemma3_text", layers=6, layer_types=["sliding_attention", "full_attention"] * 3, **LONG)
    depths, forward = [], decoder.prefill

    def prefill(contexts, sources, row_start):
        depths.append((len(decoder.model.model.layers), max(map(len, contexts))))
        return forward(contexts, sources, row_start)

    monkeypatch.setattr(decoder, "prefill", prefill)
    check_decoder(decoder, "m", 512)
    assert depths == [(2, 225), (6, 7)]  # 200 and an eighth; the whole model on 7 tokens
    assert len(decoder.model.model.layers) == 6
    assert decoder.cache.num_bytes == 0


def test_a_window_too_long_to_look_at_is_refused_with_the_remedy(make_decoder, monkeypatch):
    monkeypatch.setattr(probe, "_MOST_TOKENS", 220)
    with pytest.raises(ModelError, match=r"reaches 200 tokens.* Set model\.max_length to 200"):
        check_decoder(make_decoder(**LONG), "m", 512)
    check_decoder(make_decoder(**LONG), "m", 200)


def test_a_window_that_a_model_keeps_in_a_buffer_is_refused(make_decoder):
    config = {"attention_types": [[["global", "local"], 1]], "window_size": 12, "num_layers": 2}
    with pytest.raises(ModelError, match=r"model type 'gpt_neo'\): .* logits differ"):
        check_decoder(make_decoder("gpt_neo", **config), "m", 64)


def test_a_recurrent_state_is_refused(tmp_path):
    directory = build_tiny_model(tmp_path / "m", "mamba", state_size=4, time_step_rank=2)
    model = load_causal_lm(str(directory), attention="eager")
    with pytest.raises(ModelError, match="model type 'mamba'"):
        check_decoder(Decoder(model, fused_attention=True), "m", 64)


def test_an_exception_is_a_refusal_that_names_it(make_decoder, monkeypatch):
    decoder = make_decoder(sliding_window=8)

    def broken(*args):
        raise IndexError("list index out of range")

    monkeypatch.setattr(decoder, "decode", broken)
    with pytest.raises(ModelError, match=r"through its cache failed with IndexError: list index out of range\. Use"):
        check_decoder(decoder, "m", 64)


def test_low_precision_is_compared_loosely():
    exact = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    compare_logits(exact, exact + 1e-5, "m", "t")
    compare_logits(exact.bfloat16(), exact.bfloat16() + 0.05, "m", "t")
    with pytest.raises(ModelError, match=r"logits differ from the model's own by 0\.0"):
        compare_logits(exact, exact + 0.05, "m", "t")
    with pytest.raises(ModelError, match="not finite"):
        compare_logits(exact * torch.nan, exact, "m", "t")
