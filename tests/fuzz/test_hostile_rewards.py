"""Whatever a reward function does to its process and to those around it, each other sample has its own score."""

from __future__ import annotations

from typing import Any

from chatlearn_core.printable import printable
from chatlearn_core.runtime.boundary import MAX_REWARD


def test_every_sample_has_its_own_score(cases: Any, bounded: Any) -> None:
    known = bounded("hostile_target.py:actions", None).value
    for case in cases(quick=4):
        draw = case.random
        batches = []
        for batch in range(2):
            texts = []
            for index in range(draw.randrange(4, 12)):
                count = draw.choice([0, 0, 0, 1, 1, 2, 3])
                actions = [draw.choice(known) for _ in range(count)]
                texts.append("; ".join([*actions, str(100 * batch + index)]))
            batches.append(texts)
        order = {"batches": batches, "num_workers": draw.choice([1, 2]), "timeout_s": 2.0, "mark": f"case{case.number}"}
        outcome = bounded("hostile_target.py:judge", order, timeout_s=120.0)
        assert outcome.end == "returned", (order, outcome.output)
        assert outcome.value["left"] == [], (order, outcome.output)
        for texts, verdicts in zip(batches, outcome.value["verdicts"], strict=True):
            for text, (value, error) in zip(texts, verdicts, strict=True):
                *actions, own = text.split("; ")
                if not actions:
                    assert (value, error) == (float(own), None), (order, outcome.value, outcome.output)
                elif error is None:
                    assert value in (float(own), 0.5), (text, value)
                    assert abs(value) <= MAX_REWARD
                else:
                    assert printable(error).encode()
        assert "\x1b" not in outcome.output
