"""The function from hidden states to logits is the model's own, whatever its architecture does there."""

from __future__ import annotations

import pytest
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.own_head import own_head, trunk_name, trunk_of
from chatlearn_hf.tiny_architectures import build_tiny

TOKENS = torch.tensor([[5, 17, 40, 9, 63]])


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma2", "gemma3_text", "granite", "cohere", "minicpm3", "falcon_h1", "llama4_text", "gpt2", "bart"],
)
def test_logits_and_gradients_are_those_of_the_whole_model(model_type) -> None:
    model = build_tiny(model_type)
    whole = model(input_ids=TOKENS, use_cache=False).logits[0]
    hidden = trunk_of(model)(input_ids=TOKENS, use_cache=False).last_hidden_state[0]
    ours = own_head(model)(hidden)
    torch.testing.assert_close(ours, whole, atol=1e-6, rtol=1e-5)
    upstream = torch.randn_like(whole)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for mine, theirs in zip(
        torch.autograd.grad(ours, parameters, upstream, allow_unused=True),
        torch.autograd.grad(whole, parameters, upstream, allow_unused=True),
        strict=True,
    ):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["gemma2", "granite", "cohere", "minicpm3"])
def test_the_replaced_attention_differs(model_type) -> None:
    """Hidden states through the output embedding alone are not these models' logits."""
    model = build_tiny(model_type)
    hidden = torch.randn(3, 32)
    assert (own_head(model)(hidden) - model.lm_head(hidden)).abs().max() > 0.1


def test_the_model_keeps_its_trunk_and_sees_a_head_that_is_replaced() -> None:
    model = build_tiny("gemma2")
    trunk, head = trunk_of(model), own_head(model)
    head(torch.randn(3, 32))
    assert trunk_of(model) is trunk
    model.lm_head = torch.nn.Linear(32, 5, bias=False)
    assert head(torch.randn(3, 32)).shape == (3, 5)


def test_a_model_without_a_language_model_head_is_refused() -> None:
    with pytest.raises(ModelError, match="LlamaModel does not separate its head"):
        own_head(build_tiny("llama").model)


def test_the_trunk_is_found_where_the_prefix_names_another_module() -> None:
    model = build_tiny("llama4_text")
    assert (model.base_model_prefix, trunk_name(model)) == ("language_model", "model")
