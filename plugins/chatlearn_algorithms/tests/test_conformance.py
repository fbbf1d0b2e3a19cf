"""The suite for algorithms on every algorithm, with the settings of `plugins check` and with options that matter."""

from __future__ import annotations

from typing import Any

import pytest

from chatlearn_algorithms import plugin
from chatlearn_algorithms.conformance import SETTINGS
from chatlearn_testing.check import run_conformance

RECORDS = {record.name: record for record in plugin.chatlearn_algorithms()}
REFERENCE = {"reference": "trainer"}
KL = {"kl_coef": 0.1, "entropy_coef": 0.01}
TRUNCATED = {"top_k": 8, "max_kept_ids": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, SETTINGS.get(f"algorithm/{name}", {})) for name in RECORDS},
    "grpo-process": ("grpo", {"options": {"supervision": "process"}, "reward_steps": True}),
    "grpo-kl": ("grpo", {"options": KL | {"importance_correction": "truncate"}, "roles": REFERENCE}),
    "grpo-full-kl": ("grpo", {"options": {"kl_coef": 0.1, "kl_estimator": "full"}, "roles": REFERENCE}),
    "grpo-prompt-mean": ("grpo", {"options": {"aggregation": "prompt_mean"}}),
    "grpo-truncated": (
        "grpo",
        {"options": {"truncated_logprobs": True, "recompute_old_logprobs": False}, "sampling": TRUNCATED},
    ),
    "rloo-kl": ("rloo", {"options": {"kl_coef": 0.1}, "roles": REFERENCE}),
    "ppo-kl": ("ppo", {"options": {"kl_coef": 0.1, "kl_placement": "reward", "kl_target": 0.1, "kl_estimator": "k1"},
        "roles": REFERENCE}),
    "online_dpo-ipo": ("online_dpo", {"options": {"loss": "ipo", "group_size": 4, "pairing": "all"}}),
    "kto-zero": ("kto", {"options": {"reference_point": "zero"}}),
    "distillation-sampled": ("distillation", {"options": {"divergence": "sampled_reverse_kl"}}),
}  # fmt: skip


def test_every_algorithm_is_tested() -> None:
    assert {name for name, _ in CASES.values()} == set(RECORDS)


PARTS = {
    f"{record.kind}/{record.name}": record
    for record in (
        *plugin.chatlearn_aggregations(),
        *plugin.chatlearn_example_kinds(),
        *plugin.chatlearn_flow_methods(),
    )
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_algorithms_conform(name: str) -> None:
    results = run_conformance([PARTS[name]], settings=SETTINGS)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_conforms(case: str) -> None:
    name, settings = CASES[case]
    results = run_conformance([RECORDS[name]], settings={f"algorithm/{name}": settings})
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
