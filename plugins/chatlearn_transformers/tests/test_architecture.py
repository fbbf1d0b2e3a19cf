from __future__ import annotations

import pytest
from transformers import AutoConfig

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_transformers.architecture import attention_spans

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 24,
    },
    "original_max_position_embeddings": 24,
    "sliding_window": None,
}


@pytest.mark.engine
def test_a_rotary_embedding_that_depends_on_the_batch_is_refused_by_name(tmp_path, make_generator):
    directory = build_tiny_model(tmp_path / "m", "phi3", max_length=64, **LONGROPE)
    with pytest.raises(
        ModelError,
        match=r"cannot serve .*\(model type 'phi3'\): its rotary embedding 'longrope' depends .*model\.max_length",
    ):
        make_generator(directory)
    assert make_generator(directory, max_length=24).health() is None


@pytest.mark.parametrize(
    ("family", "config", "spans"),
    [
        ("mistral", {"sliding_window": 8}, [8]),
        ("mistral", {"sliding_window": 100}, []),
        ("qwen2", {"sliding_window": 8}, []),  # not switched on
        ("gpt_neo", {"window_size": 9, "attention_types": [[["global", "local"], 1]], "num_layers": 2}, [9]),
        ("llama4_text", {"attention_chunk_size": 16}, [16]),
        ("mixtral", {"num_local_experts": 4, "sliding_window": None}, []),
    ],
)
def test_spans_of_attention_are_found_in_the_configuration(family, config, spans):
    found = attention_spans(AutoConfig.for_model(family, **config), 64)
    assert [span for span in found if span != 28] == spans  # 28: max_window_layers
