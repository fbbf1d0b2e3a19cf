import pytest
import torch
from transformers import AutoConfig

from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hf.tiny_architectures import build_tiny
from chatlearn_hf.training_noise import configured_noise, start_training

NOISY = {
    "gpt2": {},
    # Dropout in the layer itself, and whole layers dropped by the model.
    "opt": {"layerdrop": 0.5, "ffn_dim": 64, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    # Experts are drawn while training.
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3, "num_local_experts": 4, "sliding_window": None},
}


@pytest.fixture(params=NOISY)
def model(request, tmp_path):
    directory = build_tiny_model(tmp_path / request.param, request.param, **NOISY[request.param])
    return load_causal_lm(str(directory), attention="eager")


def logits(model):
    token_ids = torch.arange(20)[None] * 7 % min(300, model.config.vocab_size)
    return model(input_ids=token_ids, use_cache=False).logits


@pytest.mark.parametrize("recompute", [False, True])
def test_training_computes_as_evaluating_does_to_the_bit(model, recompute) -> None:
    expected = logits(model)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    first = next(module for name, module in model.named_modules() if ".0." in name and name.endswith(("norm", "ln_1")))
    first.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        calls.clear()
        start_training(model, noise=False)
        found = logits(model)
        assert torch.equal(found, expected)
        found.sum().backward()
        assert len(calls) == (2 if recompute else 1), "a layer is computed again in the backward pass"


def test_layers_that_read_the_configuration_as_they_compute_are_quiet_too() -> None:
    model = build_tiny("falcon", attention_dropout=0.3, hidden_dropout=0.3)
    expected = logits(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    start_training(model, noise=False)
    assert torch.equal(logits(model), expected)
    assert model.config.hidden_dropout == 0.3, "the model's own configuration stays as it is exported"


def test_noise_is_there_where_it_is_asked_for(model) -> None:
    expected = logits(model)
    torch.manual_seed(0)
    start_training(model, noise=True)
    assert not torch.equal(logits(model), expected)
    model.eval()
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt2", {"attn_pdrop", "embd_pdrop", "resid_pdrop"}),
        ("opt", {"dropout"}),
        ("phimoe", {"router_jitter_noise"}),
        ("qwen3", set()),
        ("bert", {"attention_probs_dropout_prob", "hidden_dropout_prob"}),
    ],
)
def test_the_fields_that_ask_for_noise(family, fields) -> None:
    assert configured_noise(AutoConfig.for_model(family)).keys() == fields
