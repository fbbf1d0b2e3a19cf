"""What the comparison before a run sees: each test breaks the computation in a way that it must catch."""

from __future__ import annotations

import pytest
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_transformers import attention, probe
from chatlearn_transformers.decoder import Decoder
from chatlearn_transformers.probe import decoding_problem, logits_problem, start_decoder
from chatlearn_transformers.sequential_decoder import SequentialDecoder

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
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
    assert decoding_problem(make_decoder(dtype=dtype, **config), "m", 512) is None
    without_windows(monkeypatch)
    assert "logits differ" in decoding_problem(make_decoder(dtype=dtype, **config), "m", 512)
    # No sequence is longer than the window, so it does not matter.
    assert decoding_problem(make_decoder(dtype=dtype, **config), "m", config["sliding_window"]) is None


def test_a_long_window_is_looked_at_in_the_first_layers_only(make_decoder, monkeypatch):
    decoder = make_decoder("gemma3_text", layers=6, layer_types=["sliding_attention", "full_attention"] * 3, **LONG)
    depths, forward = [], decoder.prefill

    def prefill(contexts, sources, row_start):
        depths.append((len(decoder.model.model.layers), max(map(len, contexts))))
        return forward(contexts, sources, row_start)

    monkeypatch.setattr(decoder, "prefill", prefill)
    assert decoding_problem(decoder, "m", 512) is None
    assert depths == [(2, 225), (6, 7)]  # 200 and an eighth; the whole model on 7 tokens
    assert len(decoder.model.model.layers) == 6
    assert decoder.cache.num_bytes == 0


def test_kernels_that_know_low_precision_only_are_compared_in_it(make_decoder, monkeypatch):
    precisions = []

    def refused(*args, **kwargs):
        precisions.append("float32")
        raise RuntimeError("expected bfloat16")

    monkeypatch.setattr(probe, "functional_call", refused)
    assert decoding_problem(make_decoder(dtype=torch.bfloat16, sliding_window=8), "m", 64) is None
    assert precisions == ["float32"]
    own = attention.slot_mask

    def everything(*args, **kwargs):  # far enough from what is right to be seen in low precision, too
        mask = own(*args, **kwargs)
        return None if mask is None else torch.zeros_like(mask)

    monkeypatch.setitem(attention.AttentionMaskInterface._global_mapping, attention.NAME, everything)
    assert "the tolerance is 0.25" in decoding_problem(make_decoder(dtype=torch.bfloat16, sliding_window=8), "m", 64)


def test_a_window_too_long_to_look_at_is_refused_with_the_remedy(make_decoder, monkeypatch):
    monkeypatch.setattr(probe, "_MOST_TOKENS", 220)
    with pytest.raises(ModelError, match=r"reaches 200 tokens.* Set model\.max_length to 200"):
        decoding_problem(make_decoder(**LONG), "m", 512)
    assert decoding_problem(make_decoder(**LONG), "m", 200) is None


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 12, "num_layers": 2}),
        ("mamba", {"state_size": 4, "time_step_rank": 2}),
        ("qwen3_next", LINEAR),
    ],
)
def test_models_without_a_common_cache_are_computed_one_sequence_at_a_time(
    family, config, make_decoder, model_dir, caplog
):
    assert decoding_problem(make_decoder(family, **config), "m", 64) is not None
    model = load_causal_lm(str(model_dir(family, **config)), attention="eager")
    assert isinstance(start_decoder(model, "m", fused_attention=True, max_length=64), SequentialDecoder)
    assert f"m (model type {family}) is generated from one sequence at a time, which is slow: all" in caplog.text


def test_models_that_neither_decoder_computes_are_refused_with_both_reasons(model_dir):
    model = load_causal_lm(str(model_dir("bert")), attention="eager")
    with pytest.raises(ModelError, match=r"model type 'bert'\): sequences together, .*; one at a time, .* Use another"):
        start_decoder(model, "m", fused_attention=True, max_length=64)
    assert not model.get_output_embeddings()._forward_pre_hooks, "the model is left as it was"


def test_an_exception_is_a_reason_that_names_it(make_decoder, monkeypatch):
    decoder = make_decoder(sliding_window=8)

    def broken(*args):
        raise IndexError("list index out of range")

    monkeypatch.setattr(decoder, "decode", broken)
    assert decoding_problem(decoder, "m", 64) == "computing failed with IndexError: list index out of range"


def test_weights_that_are_not_finite_are_refused(make_decoder):
    decoder = make_decoder("qwen3")
    decoder.model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="m: the model's logits are not finite on a short probe"):
        decoding_problem(decoder, "m", 64)


def test_low_precision_is_compared_loosely():
    exact = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert logits_problem(exact, exact + 1e-5) is None
    assert logits_problem(exact.bfloat16(), exact.bfloat16() + 0.05) is None
    assert logits_problem(exact, exact + 0.05).startswith("logits differ from the model's own by 0.0")
    assert logits_problem(exact, exact * torch.nan) is not None
