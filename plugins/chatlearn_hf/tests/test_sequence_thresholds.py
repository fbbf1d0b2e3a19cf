from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from chatlearn_hf.sequence_thresholds import Threshold, thresholds

LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {}, []),
        ("mistral", {"sliding_window": 4096}, [("sliding_window", 4096, "window")]),
        ("mistral", {"sliding_window": None}, []),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, []),
        (
            "qwen2",
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2},
            [("sliding_window", 4096, "window")],
        ),
        ("llama4_text", {}, [("attention_chunk_size", 8192, "chunk")]),
        ("deepseek_v32", {}, [("index_topk", 2048, "selection")]),
        (
            "phi3",
            {"rope_parameters": LONG, "original_max_position_embeddings": 4096, "sliding_window": 2047},
            [("sliding_window", 2047, "window"), ("original_max_position_embeddings", 4096, "rope")],
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            [("max_position_embeddings", 2048, "rope")],
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            [],
        ),
    ],
)
def test_configurations_tell_where_computation_changes(model_type, fields, expected) -> None:
    found = thresholds(AutoConfig.for_model(model_type, **fields).get_text_config())
    assert found == [Threshold(*each) for each in expected]
