"""Rotary embeddings whose frequencies depend on length give each sequence what it has alone."""

from __future__ import annotations

import pytest
import torch

from chatlearn_hf.packed_forward import PackedModel
from chatlearn_hf.tiny_architectures import DYNAMIC_ROPE, LONG_ROPE, build_tiny
from chatlearn_hf.varlen_attention import PackedLayout

MODELS = {
    "dynamic": ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 12}),
    "longrope": ("phi3", {"rope_parameters": LONG_ROPE}),
    "longrope with windows": ("phimoe", {"rope_parameters": LONG_ROPE}),
}
LENGTHS = (5, 20, 9, 31, 1, 1, 7)
"""Below and beyond the original context, in turns."""


def alone(name: str, tokens: torch.Tensor) -> torch.Tensor:
    """[T, H] states of a sequence in a model that has seen nothing before."""
    model_type, fields = MODELS[name]
    return build_tiny(model_type, **fields).model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]


def sequences() -> list[torch.Tensor]:
    return [(torch.arange(length) * 31 + 7 * place) % 90 + 5 for place, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("rows", ["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_states_are_those_of_each_sequence_alone(name, rows) -> None:
    model_type, fields = MODELS[name]
    model = PackedModel(build_tiny(model_type, "sdpa", **fields))
    model.rows = rows
    assert model.has_sequence_rope
    with torch.no_grad():
        expected = torch.cat([alone(name, tokens) for tokens in sequences()])
        for _ in range(2):  # the second pass must not remember the first
            ours = model.hidden_states(torch.cat(sequences()), PackedLayout(LENGTHS))
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_alone_takes_them_from_the_longest(name) -> None:
    """What would happen without: the reason for the module, and that these tests can fail."""
    model_type, fields = MODELS[name]
    model = build_tiny(model_type, "sdpa", **fields)
    layout = PackedLayout(LENGTHS)
    with torch.no_grad():
        tokens = torch.cat(sequences())[None]
        packed = model.model(input_ids=tokens, position_ids=layout.position_ids[None], use_cache=False)
        first = packed.last_hidden_state[0, : LENGTHS[0]]
        assert (first - alone(name, sequences()[0])).abs().max() > 0.01


def test_prompts_are_not_shared_between_sequences_of_other_lengths() -> None:
    model_type, fields = MODELS["dynamic"]
    assert not PackedModel(build_tiny(model_type, "eager", **fields)).takes_shared_rows
    assert not PackedModel(build_tiny("llama", "eager")).has_sequence_rope
