from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from chatlearn_rewards.options import FormatOptions, FunctionOptions, MathOptions


@pytest.mark.parametrize("model", [MathOptions, FormatOptions, FunctionOptions])
def test_more_workers_than_cpus_can_serve_are_told(model, monkeypatch):
    required = {FormatOptions: {"pattern": "a"}, FunctionOptions: {"path": "m:f"}}.get(model, {})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert model(**required).warnings == model(**required, num_workers=8).warnings == ()
    [(option, sentence)] = model(**required, num_workers=9).warnings
    assert (option, sentence) == (
        "num_workers",
        "9 processes share 2 CPUs: they start slowly, perhaps too slowly to answer in time; 2 processes would "
        "judge as fast",
    )


def test_more_workers_than_a_machine_can_start_are_refused():
    assert MathOptions(num_workers=256).num_workers == 256
    with pytest.raises(ValidationError, match="less than or equal to 256"):
        MathOptions(num_workers=257)
