"""The template's algorithm with one fault each, as an author might make it, and the contract test that must fail.

Each mutant is an edit of the source of ``algorithm.py`` or ``loss.py``; a mutant whose text is no longer there is an
error.
"""

from __future__ import annotations

from dataclasses import dataclass

MASK = "test_tokens_outside_the_mask_do_not_count"
GRADIENT = "test_gradients_are_those_of_the_loss"
CUT = "test_micro_batches_add_up"
ORDER = "test_advantages_follow_the_samples_not_their_order"
ALONE = "test_advantages_of_a_group_need_no_other_group"
ODD = "test_odd_rewards_give_finite_advantages"
FIT = "test_advantages_are_finite_and_fit_the_batch"
VALUE = "test_losses_are_values"
QUIET = "test_advantages_change_nothing"
FLOW = "test_flow_names_its_roles"

TOTAL = 'total = -(batch.token_data["loss_weight"] * batch.token_data["advantages"] * learned).sum()'
WEIGHTED = 'batch.token_data["loss_weight"] * batch.token_data["advantages"] * learned'
RATIO = WEIGHTED.replace("learned", "(learned - batch.token_data['generator_logprobs']).exp()")
CENTRED = "advantages = rewards - (sums[group] - rewards) / others.clamp(min=1)"
LEARNED = "learned = torch.where(batch.loss_mask, logprobs, logprobs.new_zeros(()))"
ROWS = "torch.where(batch.loss_mask, advantages[batch.sequence_index], 0.0).float()"
PREPARED = 'return replace(batch, token_data=batch.token_data | {"loss_weight": weights})'


@dataclass(slots=True, frozen=True)
class AlgorithmMutant:
    """One edit of the template's source."""

    name: str
    file: str
    """``algorithm`` or ``loss``."""
    old: str
    new: str
    caught_by: str
    """The contract test that fails; others may fail, too."""
    also: tuple[tuple[str, str], ...] = ()
    """Further edits of the same file, where one alone changes nothing that can be seen."""


def _loss(name: str, old: str, new: str, caught_by: str, *also: tuple[str, str]) -> AlgorithmMutant:
    return AlgorithmMutant(name, "loss", old, new, caught_by, also)


def _advantages(name: str, old: str, new: str, caught_by: str, *also: tuple[str, str]) -> AlgorithmMutant:
    return AlgorithmMutant(name, "algorithm", old, new, caught_by, also)


MUTANTS = (
    _loss("no_mask", TOTAL, "total = -(batch.token_data['advantages'] * logprobs).sum() / 50", MASK),
    _loss("entropy_of_prompts", TOTAL, f"{TOTAL} + 0.01 * logprobs.sum()", MASK),
    _loss("prompts_weigh", "batch.loss_mask, logprobs,", "torch.ones_like(batch.loss_mask), logprobs,", MASK,
        ("-(batch.token_data[\"loss_weight\"] *", "-(0.01 *")),
    _loss("detached", LEARNED, f"{LEARNED}.detach() + 0 * logprobs", GRADIENT),
    _loss("half_detached", TOTAL, f"{TOTAL} - learned.detach().square().sum()", GRADIENT),
    _loss("square_detached", TOTAL, f"{TOTAL} + (learned.detach() * learned).sum()", GRADIENT),
    _loss("float32", TOTAL, f"{TOTAL}.float()", GRADIENT),
    _loss("mean", TOTAL, f"{TOTAL} / batch.num_sequences", CUT),
    _loss("weights_of_the_part", WEIGHTED, 'batch.token_data["advantages"] * learned / batch.loss_mask.sum()', CUT),
    _loss("whitened_by_part", WEIGHTED, f"{WEIGHTED} / (1 + batch.token_data['advantages'].std(unbiased=False))", CUT),
    _loss("counts_sequences", TOTAL, f"{TOTAL} + 0.1 * logprobs.sum() / batch.num_sequences", CUT),
    _loss("metric_without_count", "int(batch.loss_mask.sum()))", "1)", CUT),
    _loss("metric_is_a_mean", "learned.detach().sum(dtype", "learned.detach().mean(dtype", CUT),
    _loss("empty_is_a_constant", "return LossOutput(logprobs.sum())", "return LossOutput(torch.zeros(()))",
        "test_an_empty_micro_batch_is_a_connected_zero"),
    _loss("empty_raises", "LossOutput(logprobs.sum())", "LossOutput(logprobs.max())", CUT),
    _loss("in_place", LEARNED, f"{LEARNED}; logprobs.data.mul_(0.5)", VALUE),
    _loss("writes_the_batch", TOTAL, f"batch.token_data['advantages'] *= 0.5; {TOTAL}", VALUE),
    _loss("prepare_writes_the_batch", PREPARED, 'batch.token_data["loss_weight"] = weights; return batch', VALUE),
    _loss("prepare_scales_advantages", PREPARED, f"batch.token_data['advantages'].mul_(2); {PREPARED}", VALUE),
    _loss("random", TOTAL, f"{TOTAL} * (1 + 1e-3 * torch.rand(()))", VALUE),
    _loss("seeds", TOTAL, f"torch.manual_seed(0); {TOTAL}", VALUE),
    _loss("first_sequence_counts_twice", WEIGHTED, f"{WEIGHTED} * (1 + (batch.sequence_index == 0))",
        "test_order_of_samples_does_not_matter"),
    _loss("baseline_of_the_neighbour", WEIGHTED, f"{WEIGHTED.replace('learned', '(learned - learned.roll(6))')}",
        "test_order_of_samples_does_not_matter"),
    _loss("unknown_output", 'frozenset({"logprobs"})', 'frozenset({"logprobs", "logits"})', FLOW),
    _loss("ratio_at_another_temperature", "temperature=self.temperature)", "temperature=1.0)",
        "test_compared_outputs_have_one_temperature",
        (WEIGHTED, RATIO)),
    _loss("unit", 'return "sequence"', 'return "token"', FLOW),
    _advantages("unknown_role", 'RoleUpdate("trainer"', 'RoleUpdate("actor"', FLOW),
    _advantages("updates_the_reward", 'RoleUpdate("trainer"', 'RoleUpdate("reward"', FLOW),
    _advantages("no_update", 'return [RoleUpdate("trainer"', 'return [][:0] and [RoleUpdate("trainer"', FLOW),
    _advantages("groups_by_place", "group = torch.unique(batch.group_index, return_inverse=True)[1]",
        "group = torch.arange(batch.num_sequences) // self.group_size", ORDER),
    _advantages("baseline_of_the_batch", CENTRED, "advantages = rewards - rewards.mean()", ALONE),
    _advantages("whitened", CENTRED, f"{CENTRED}; advantages = advantages / (1 + rewards.std(unbiased=False))", ALONE),
    _advantages("position_bonus", CENTRED, f"{CENTRED}; advantages = advantages + torch.arange(len(rewards))", ORDER),
    _advantages("alone_divides_by_0", ".clamp(min=1)", "", ODD, ("if count == 0", "if count < 0")),
    _advantages("divided_by_spread", CENTRED, f"{CENTRED}; advantages = advantages / advantages.std()", ALONE),
    _advantages("divided_by_group_spread", CENTRED,
        f"{CENTRED}; spread = torch.zeros_like(sums).index_add(0, group, advantages.square()).sqrt();"
        " advantages = advantages / spread[group]", ODD),
    _advantages("logarithm", CENTRED, "advantages = (rewards - 0.5).log()", FIT),
    _advantages("one_per_sequence", ROWS, "advantages.float()", FIT),
    _advantages("metric_over_nothing", "Metric(float(rewards.sum()), len(rewards))", "Metric(float('nan'))", FIT),
    _advantages("excludes_strangers", "dict.fromkeys(alone,", 'dict.fromkeys([*alone, "p9"],', FIT),
    _advantages("excludes_all", "dict.fromkeys(alone,", "dict.fromkeys(batch.sample_ids,", FIT),
    _advantages("no_reason", '"group_too_small"', '""', ODD),
    _advantages("changes_rewards", CENTRED, f"rewards -= rewards.mean(); {CENTRED}", QUIET),
    _advantages("dropout", CENTRED, f"{CENTRED}; advantages = advantages * torch.rand(())", QUIET),
    _advantages("running_mean", CENTRED,
        f"self.mean = 0.9 * getattr(self, 'mean', 0.0) + 0.1; {CENTRED}; advantages = advantages - self.mean", QUIET),
    _advantages("metric_of_groups", "Metric(float(rewards.sum()), len(rewards))", "Metric(float(rewards.mean()))",
        ALONE),
    _advantages("lost_state", "    def updates(self,",
        "    def state_dict(self) -> dict[str, Any]:\n        return {'seen': getattr(self, 'seen', 0)}\n\n"
        "    def after_step(self, step: int, metrics: Any) -> None:\n        self.seen = step\n\n"
        "    def updates(self,", "test_state_comes_back"),
    _advantages("wants_fewer", "    def updates(self,",
        "    def wanted(self, samples: Sequence[Any]) -> int:\n        return -1\n\n    def updates(self,",
        "test_wants_a_possible_number_of_examples"),
    _advantages("no_learning", CENTRED, "advantages = 0 * rewards", GRADIENT),
)  # fmt: skip
