from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from chatlearn_algorithms.grpo import GRPO
from chatlearn_algorithms.grpo_options import DrGRPOOptions, GRPOOptions
from chatlearn_algorithms.objectives import Clip
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.types import LogprobBasis, pack_samples, scored_batch


@dataclass
class Role:
    name: str
    calls: list[str]

    def __getattr__(self, method):
        def call(value, **arguments):
            self.calls.append(f"{self.name}.{method}({value})")
            return f"{self.name}_{method}"

        return call


@dataclass
class Roles:
    """Stands for the tracer: writes down what a flow calls."""

    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name):
        return Role(name, self.calls)

    def join(self, *parts):
        return parts


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ["reward_score", "trainer_logprobs"]),
        ({"recompute_old_logprobs": False}, ["reward_score"]),
        ({"kl_coef": 0.1}, ["reward_score", "reference_logprobs", "trainer_logprobs"]),
        ({"kl_coef": 0.1, "kl_estimator": "full"}, ["reward_score", "reference_topk", "trainer_logprobs"]),
    ],
)
def test_flow_asks_for_what_the_options_need(make_context, options, parts):
    algorithm = GRPO(GRPOOptions(**options), make_context(reference="trainer"))
    roles = Roles()
    assert algorithm.flow("prompts", roles) == ("generator_generate", *parts)
    assert roles.calls[0] == "generator.generate(prompts)"
    assert all(call.endswith("(generator_generate)") for call in roles.calls[1:])
    assert (algorithm.input, algorithm.group_size) == ("prompts", 8)


def test_loss_has_the_options(make_context):
    options = GRPOOptions(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        aggregation="token_mean",
        kl_coef=0.2,
        kl_estimator="k2",
        kl_weight="ratio",
        kl_clamp="none",
        entropy_coef=0.01,
        log_entropy=False,
        importance_correction="mask",
        importance_level="sequence",
        importance_threshold=4.0,
        importance_min=0.5,
    )
    loss = GRPO(options, make_context(LogprobBasis(0.7), reference="trainer")).loss()
    assert loss.objective == Clip(0.1, 0.3, 3.0)
    for name in ("entropy_coef", "kl_coef", "kl_estimator", "kl_weight", "kl_clamp"):
        assert getattr(loss, name) == getattr(options, name)
    assert loss.aggregation.name == options.aggregation
    assert (loss.temperature, loss.log_entropy, loss.old_logprobs) == (0.7, False, "trainer_logprobs")
    assert (loss.correction.mode, loss.correction.level) == ("mask", "sequence")
    assert (loss.correction.threshold, loss.correction.minimum) == (4.0, 0.5)


def test_generator_logprobs_as_old(make_context):
    loss = GRPO(GRPOOptions(recompute_old_logprobs=False), make_context()).loss()
    assert loss.old_logprobs == "generator_logprobs"


@pytest.mark.parametrize(("given", "used"), [(None, 16), (50, 50)])
def test_dr_grpo_constant_length(make_context, given, used):
    loss = GRPO(DrGRPOOptions(constant_length=given), make_context()).loss()
    assert (loss.aggregation.name, loss.aggregation.options.constant_length) == ("seq_mean_token_sum_norm", used)


def test_dr_grpo_closed_form(make_context, make_group):
    """On policy the loss is −Σ_i A_i·|o_i| / (S·L) with A = r − mean: rewards 1, 0, 0, 1 and lengths 2, 3, 4, 5."""
    algorithm = GRPO(DrGRPOOptions(group_size=4), make_context(max_completion_tokens=10))
    samples = make_group("a", [1.0, 0.0, 0.0, 1.0], [2, 3, 4, 5])
    derived = algorithm.advantages(scored_batch(samples), step=1)
    for sample in samples:
        sample.token_data["trainer_logprobs"] = sample.token_data["generator_logprobs"]
    loss = algorithm.loss()
    batch = pack_samples(samples)
    batch.token_data |= derived.token_data
    batch = loss.prepare(batch)
    logprobs = batch.token_data["trainer_logprobs"].clone().requires_grad_()
    total = loss({"logprobs": logprobs, "entropy": torch.zeros_like(logprobs)}, batch).total
    assert total.item() == pytest.approx(-(0.5 * 2 - 0.5 * 3 - 0.5 * 4 + 0.5 * 5) / (4 * 10), abs=1e-7)
    total.backward()
    expected = torch.where(batch.loss_mask, -batch.token_data["advantages"] / 40, 0.0)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize("roles", [{}, {"reference": "generator"}])
def test_kl_without_a_reference_is_refused(make_context, roles):
    with pytest.raises(ConfigError, match=r"kl_coef is 0\.1, which needs a role 'reference' of kind trainer"):
        GRPO(GRPOOptions(kl_coef=0.1), make_context(**roles))


@pytest.mark.parametrize(
    "options", [{"recompute_old_logprobs": False}, {"importance_correction": "truncate"}], ids=lambda o: next(iter(o))
)
@pytest.mark.parametrize("basis", [LogprobBasis(0.7, top_p=0.9), LogprobBasis(1.0, top_k=20)], ids=str)
def test_ratios_between_different_bases_are_refused(make_context, options, basis):
    with pytest.raises(
        ConfigError, match=f"{next(iter(options))}=.* compares trainer_logprobs with generator_logprobs"
    ):
        GRPO(GRPOOptions(**options), make_context(basis))


def test_truncated_logprobs_may_be_compared_with_those_of_the_sampled_distribution(make_context):
    options = GRPOOptions(truncated_logprobs=True, importance_correction="truncate", kl_coef=0.1)
    basis = LogprobBasis(0.7, top_p=0.9, top_k=20)
    loss = GRPO(options, make_context(basis, reference="trainer")).loss()
    assert loss.needs.names == {"truncated_logprobs", "entropy"}
    assert (dict(loss.needs.arguments), loss.needs.temperature) == ({"kept": "kept_ids"}, 0.7)
    assert loss.old_logprobs == "trainer_truncated_logprobs"
    with pytest.raises(ConfigError, match="importance_correction=truncate compares"):
        GRPO(options, make_context(basis, generator_basis=LogprobBasis(), reference="trainer"))


COMPARING = [
    {"recompute_old_logprobs": False},
    {"importance_correction": "mask"},
    {"kl_coef": 0.1, "kl_weight": "generator_ratio"},
]


@pytest.mark.parametrize("options", COMPARING, ids=lambda options: next(reversed(options)))
@pytest.mark.parametrize("basis", [LogprobBasis(0.7), LogprobBasis(1.0, top_p=0.9)], ids=str)
def test_ratios_to_a_generator_with_raw_logprobs_are_refused(make_context, options, basis):
    context = make_context(basis, generator_basis=LogprobBasis(), reference="trainer")
    with pytest.raises(ConfigError) as caught:
        GRPO(GRPOOptions(**options), context)
    message = str(caught.value)
    setting, value = next(reversed(options.items()))
    assert f"algorithm.options.{setting}={str(value).lower()} compares trainer_logprobs" in message
    assert "generator_logprobs of acme (role generator)" in message
    assert "processed logprobs" in message


def test_raw_logprobs_are_fine_where_nothing_compares_them(make_context):
    context = make_context(LogprobBasis(0.7), generator_basis=LogprobBasis(), reference="trainer")
    algorithm = GRPO(GRPOOptions(kl_coef=0.1, kl_weight="ratio"), context)
    assert algorithm.loss().temperature == 0.7


def test_a_cut_basis_is_fine_where_the_trainer_recomputes(make_context):
    GRPO(GRPOOptions(), make_context(LogprobBasis(0.7, top_p=0.9)))


def test_advantages_measure_rewards(make_context, make_group):
    algorithm = GRPO(GRPOOptions(), make_context())
    derived = algorithm.advantages(scored_batch(make_group("a", [1.0, 0.0])), step=1)
    assert derived.metrics["reward"].value == 0.5
    assert derived.token_data["advantages"].any()


def test_roles_have_the_names_that_the_options_say(make_context):
    """The flow calls them, the loss reads their logprobs, the configuration must define them."""
    names = {"policy": "actor", "generator": "sampler", "reward": "judge", "reference": "anchor"}
    options = GRPOOptions(kl_coef=0.1, roles=names)
    algorithm = GRPO(options, make_context(anchor="trainer"))
    roles = Roles()
    algorithm.flow("prompts", roles)
    assert [call.partition("(")[0] for call in roles.calls] == [
        "sampler.generate",
        "judge.score",
        "anchor.logprobs",
        "actor.logprobs",
    ]
    [update] = algorithm.updates(1)
    assert (algorithm.policy, update.role, update.epochs, update.mini_batches) == ("actor", "actor", None, None)
    assert (update.loss.old_logprobs, update.loss.reference) == ("actor_logprobs", "anchor")
    assert dict(options.required_roles) == {"sampler": "generator", "judge": "reward", "actor": "trainer"}
    with pytest.raises(ConfigError, match="needs a role 'anchor' of kind trainer"):
        GRPO(options, make_context())
