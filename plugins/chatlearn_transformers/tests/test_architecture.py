from __future__ import annotations

import pytest
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_transformers.architecture import check_probe

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_attention"),
        ("mistral", {"sliding_window": 8}, "sliding-window attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary embedding 'dynamic'",
        ),
    ],
)
def test_unsupported_attention_is_refused_by_name(family, config, reason, tmp_path, make_generator):
    from chatlearn_hf.tiny import build_tiny_model

    directory = build_tiny_model(tmp_path / "m", family, **config)
    with pytest.raises(ModelError, match=rf"cannot serve .*\(model type '{family}'\): .*{reason}"):
        make_generator(directory)


def test_a_head_that_is_more_than_a_matrix_is_refused(tmp_path, make_generator):
    from chatlearn_hf.tiny import build_tiny_model

    # Granite divides its logits after the head, which applying the head alone would miss.
    directory = build_tiny_model(tmp_path / "m", "granite", logits_scaling=4.0)
    with pytest.raises(ModelError, match=r"model type 'granite'\): computed through its cache, logits differ"):
        make_generator(directory)


def test_low_precision_is_compared_loosely():
    exact = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    check_probe(exact, exact + 1e-5, "m", "t")
    check_probe(exact.bfloat16(), exact.bfloat16() + 0.05, "m", "t")
    with pytest.raises(ModelError, match=r"logits differ from the model's own by 0\.0"):
        check_probe(exact, exact + 0.05, "m", "t")
    with pytest.raises(ModelError, match="not finite"):
        check_probe(exact * torch.nan, exact, "m", "t")
