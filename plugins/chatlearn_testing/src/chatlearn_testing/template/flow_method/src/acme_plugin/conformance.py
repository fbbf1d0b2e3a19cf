"""Settings with which the conformance suite tests this package; a run never imports this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from chatlearn_core.types import OutputRequest, Sample, pack_samples

TEMPERATURE = 0.5


def expected(samples: Sequence[Sample], role: Any) -> list[Mapping[str, Any]]:
    """The data of each sample, computed for it alone; ``role`` is the kit's trainer."""
    made: list[Mapping[str, Any]] = []
    for sample in samples:
        with torch.no_grad():
            outputs = role.outputs(pack_samples([sample]), OutputRequest(frozenset({"logprobs"}), TEMPERATURE))
        logprobs = outputs["logprobs"].numpy()
        mean = logprobs[sample.loss_mask].mean()
        made.append({"own_logprobs": logprobs, "own_acme": mean})
    return made


SETTINGS: dict[str, dict[str, Any]] = {
    "flow_method/trainer.acme": {
        "arguments": {"temperature": TEMPERATURE},
        "expected": expected,
    },
}
