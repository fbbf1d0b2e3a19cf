"""The updates of algorithms on two ranks are those of one: loss, metrics, gradient norm and gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from chatlearn_core.executor.aggregations import select_aggregation
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Algorithm, AlgorithmContext
from chatlearn_core.types import LogprobBasis, TrainBatch
from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.05, "importance_correction": "truncate"},
    "dr_grpo": {},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "rloo": {},
    "reinforce_pp": {},
    "gdpo": {"rewards": {"right": 1.0, "short": 0.5}},
    "reinforce_pp_baseline": {},
    "maxrl": {},
    "ppo": {"whiten_advantages": True},
    "decoupled_ppo": {},
    "dpo": {},
    "ipo": {},
    "kto": {},
    "simpo": {},
    "orpo": {},
    "reward_model": {"margin_coef": 0.5, "centring_coef": 0.01},
    "distillation": {"divergence": "reverse_kl", "top_k": 4},
    "rejection_sampling": {"group_size": 4, "keep": 3},
    "sft": {},
}
TOP_K = 4
ROLES = dict.fromkeys(("trainer", "reference", "critic", "teacher"), "trainer") | {
    "generator": "generator",
    "reward": "reward",
}
LIKELY = -5.7
"""About the logprob of a token under the tiny model, whose 300 tokens are almost equally likely."""
ONE = [list(range(12))]
TWO = [[0, 1, 3, 4, 6, 7, 9, 10], [2, 5, 8, 11]]
"""Two of the three groups, and the third."""


def scored(grouped: TrainBatch) -> TrainBatch:
    """Three groups of four with rewards, labels, ranks, and what the flows of the algorithms have computed."""
    random = torch.Generator().manual_seed(11)
    near = {
        name: torch.where(grouped.loss_mask, LIKELY + 0.1 * torch.randn(grouped.num_tokens, generator=random), 0.0)
        for name in ("trainer_logprobs", "reference_logprobs", "generator_logprobs")
    }
    values = {"critic_values": torch.randn(grouped.num_tokens, generator=random)}
    likely = torch.rand(grouped.num_tokens, TOP_K, generator=random).argsort(-1) + 30
    shares = torch.rand(grouped.num_tokens, TOP_K, generator=random) / TOP_K
    values |= {"teacher_topk_ids": likely, "teacher_topk_logprobs": shares.log()}
    rewards = torch.rand(12, generator=random, dtype=torch.float64)
    data = {"reward": rewards, "rank": rewards, "label": (rewards > 0.5).double()}
    data |= {f"reward/{name}": torch.rand(12, generator=random, dtype=torch.float64) for name in ("right", "short")}
    for role in ("trainer", "reference"):  # of the mismatched completions of KTO
        data[f"{role}_mismatched_logprobs"] = LIKELY * torch.rand(12, generator=random, dtype=torch.float64)
    return replace(grouped, unit_index=grouped.group_index, token_data=near | values, sequence_data=data)


def build(registry: PluginRegistry, name: str, options: dict[str, Any]) -> Algorithm:
    record = registry.select("algorithm", name)
    context = AlgorithmContext(
        LogprobBasis(), 64, ROLES, LogprobBasis(), "the test's", aggregation=partial(select_aggregation, registry)
    )
    algorithm: Algorithm = registry.load_factory(record)(registry.load_options(record)(**options), context)
    return algorithm


@pytest.fixture(scope="module")
def answers(
    run_jobs: Any, grouped_sequences: TrainBatch, chatlearn_registry: PluginRegistry, tmp_path_factory: Any
) -> Any:
    """Job -> answers of its ranks; a job is ``<algorithm>-<role>-<layout>``."""
    root = tmp_path_factory.mktemp("algorithms")
    model = str(build_tiny_model(root / "model", "qwen3"))
    jobs: dict[str, Any] = {}
    for name, options in ALGORITHMS.items():
        algorithm, batch = build(chatlearn_registry, name, options), scored(grouped_sequences)
        derived = algorithm.advantages(batch, 1)
        kept = [index for index, sample in enumerate(batch.sample_ids) if sample not in derived.exclusions]
        assert len(kept) == (9 if name == "rejection_sampling" else 12)
        batch = replace(
            batch,
            token_data=batch.token_data | derived.token_data,
            sequence_data=batch.sequence_data | derived.sequence_data,
        ).select(kept)
        one, two = ([[kept.index(i) for i in part if i in kept] for part in layout] for layout in (ONE, TWO))
        for update in algorithm.updates(1):
            head = "value" if update.role == "critic" else "reward" if name == "reward_model" else "lm"
            job = {"model": model, "head": head, "loss": update.loss, "batch": update.loss.prepare(batch)}
            jobs[f"{name}-{update.role}-one"] = job | {"slices": one}
            jobs[f"{name}-{update.role}-two"] = job | {"slices": two, "options": {"max_tokens_per_micro_batch": 100}}
    return run_jobs(jobs, grouped_sequences, root / "answers")


CRITICS = [(name, "critic") for name in ("ppo", "decoupled_ppo")]


@pytest.mark.parametrize(("name", "role"), [*((name, "trainer") for name in ALGORITHMS), *CRITICS])
def test_two_ranks_take_the_step_of_one(answers: Any, name: str, role: str) -> None:
    [one], two = answers[f"{name}-{role}-one"], answers[f"{name}-{role}-two"]
    assert one["metrics"]["grad_norm"] > 0
    assert two[0]["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-4)
    own = {metric for metric in one["metrics"] if not metric.startswith(("perf/", "timing_s/"))} - {"grad_norm", "lr"}
    assert "loss" in own
    for metric in own:
        total = sum(rank["metrics"].get(metric, 0.0) for rank in two)
        assert total == pytest.approx(one["metrics"][metric], rel=1e-4, abs=1e-6), metric
    for parameter, gradient in one["gradients"].items():
        assert (two[0]["gradients"][parameter] - gradient).norm() <= 1e-4 * gradient.norm(), parameter
