from __future__ import annotations

import numpy as np
import pytest

from chatlearn_transformers import probe
from chatlearn_transformers.decoder import Decoder
from chatlearn_transformers.served_models import ServedModel, check_served_model


def test_right_and_refused(model_dir):
    assert check_served_model(model_dir("mistral", sliding_window=8)) == ServedModel("right")
    neo = model_dir("gpt_neo", num_layers=2, attention_types=[[["local"], 2]], window_size=12)
    assert check_served_model(neo, attention="eager") == ServedModel("right", together=False)
    refused = check_served_model(model_dir("bert"))
    assert refused.status == "refused"
    assert "model type 'bert'" in refused.reason


def test_a_difference_missed_by_the_probe_is_reported_as_wrong(model_dir, monkeypatch):
    monkeypatch.setattr(probe, "decoding_problem", lambda *args: None)
    decode = Decoder.decode
    # Positions are off by one from the eleventh token on.
    monkeypatch.setattr(
        Decoder, "decode", lambda self, tokens, lengths: decode(self, tokens, np.maximum(lengths - (lengths > 10), 0))
    )
    found = check_served_model(model_dir())
    assert found.status == "wrong"
    assert float(found.reason.split("differ by ")[1].split()[0]) > 1e-3


@pytest.mark.parametrize("length", [2, 5])
def test_short_limits(length, model_dir):
    assert check_served_model(model_dir("mistral", sliding_window=4), length=length).status == "right"
