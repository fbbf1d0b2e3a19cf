"""What the terminal says of an evaluation."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from chatlearn_core.cli.progress_bar import ProgressBar


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"eval/accuracy": 0.403, "eval/reward": 0.5}, "step 0: accuracy 40.3% on 300 evaluation samples"),
        ({"eval/reward": 0.979}, "step 0: mean reward 0.979 on 300 evaluation samples"),
        ({"eval/failed": 300.0}, "step 0: no reward on 300 evaluation samples"),
    ],
)
def test_only_an_accuracy_is_called_one(metrics: dict[str, float], said: str) -> None:
    text = io.StringIO()
    ProgressBar(console=Console(file=text, width=200)).evaluated(0, {"eval/samples": 300.0, **metrics})
    assert text.getvalue().strip() == said
