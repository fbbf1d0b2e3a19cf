"""The template's aggregation with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

WEIGHTS = "test_tokens_get_their_weights"
NUMBERS = "test_weights_are_numbers_one_for_each_token"
ORDER = "test_the_order_of_sequences_does_not_matter"
LABELS = "test_names_and_numbers_of_groups_do_not_matter"
GROUPS = "test_groups_matter_only_if_declared"
READS = "test_only_declared_fields_are_read"
ALONE = "test_weights_depend_on_the_mini_batch_alone"
READ_ONLY = "test_a_batch_is_read_only"
PARTS = "test_micro_batches_add_up"
LONG = "test_long_sequences_are_weighed"
QUIET = "test_the_process_stays_as_it_was"

MASK = "mask = batch.loss_mask.double()"
LENGTHS = "lengths = mask.new_zeros(batch.num_sequences).index_add_(0, sequence, mask)"
TRAINED = "trained = lengths > 0"
POWERS = "torch.where(trained, lengths.clamp(min=1) ** options.power, 0.0)"
DIVISOR = "(lengths.clamp(min=1) * powers.sum().clamp(min=1))"
RETURN = "return (mask * per_token[sequence]).float()"
WEIGHED = "(mask * per_token[sequence]).float()"


def _aggregation(
    name: str, caught_by: str, old: str, new: str, file: str = "aggregation.py", equivalent: str = ""
) -> SourceMutant:
    return SourceMutant("aggregation", name, file, old, new, caught_by, equivalent=equivalent)


MUTANTS = (
    # Weights
    _aggregation("every_sequence_weighs_the_same", WEIGHTS, "** options.power", "** 0"),
    _aggregation("every_token_weighs_the_same", WEIGHTS, "** options.power", "** 1"),
    _aggregation("another_power_by_default", WEIGHTS, "        0.5, ge=0", "        0.25, ge=0", "options.py"),
    _aggregation("masked_tokens_are_counted", WEIGHTS, LENGTHS, "lengths = batch.cu_seqlens.diff().double()"),
    _aggregation("a_sum_instead_of_a_mean", WEIGHTS, DIVISOR, "powers.sum().clamp(min=1)"),
    _aggregation("divided_by_all_sequences", WEIGHTS, "powers.sum().clamp(min=1)", "batch.num_sequences"),
    _aggregation("untrained_sequences_count", WEIGHTS, POWERS, "lengths.clamp(min=1) ** options.power"),
    _aggregation("nothing_is_normalised", WEIGHTS, DIVISOR, "lengths.clamp(min=1)"),
    _aggregation("half_precision", WEIGHTS, RETURN, f"return {WEIGHED}.half()"),
    _aggregation("the_mean_of_the_weights_is_one", WEIGHTS, RETURN, f"return {WEIGHED} * mask.sum().float()"),
    _aggregation("prompts_have_weight", NUMBERS, RETURN, "return per_token[sequence].float()"),
    _aggregation("one_weight_for_each_sequence", NUMBERS, RETURN, "return per_token.float()"),
    _aggregation("weights_in_a_column", NUMBERS, RETURN, f"return {WEIGHED}[:, None]"),
    _aggregation("a_list_of_weights", NUMBERS, RETURN, f"return {WEIGHED}.tolist()"),
    _aggregation("whole_numbers", NUMBERS, RETURN, "return (mask * per_token[sequence]).round().long()"),
    _aggregation("nan_if_nothing_is_trained", NUMBERS, "powers.sum().clamp(min=1)", "powers.sum()"),
    _aggregation("nan_in_an_empty_sequence", NUMBERS, DIVISOR, "(lengths * powers.sum().clamp(min=1))"),
    _aggregation("an_empty_batch_fails", NUMBERS, TRAINED, f"{TRAINED}; assert lengths.max() >= 0"),
    _aggregation("weights_with_a_gradient", NUMBERS, RETURN, f"return {WEIGHED}.requires_grad_()"),
    # Of what they depend on
    _aggregation("the_first_sequence_weighs_more", ORDER, TRAINED, f"{TRAINED}; lengths[:1] *= 2"),
    _aggregation("normalised_by_the_last", ORDER, "powers.sum().clamp(min=1)", "powers[-1:].sum().clamp(min=1)"),
    _aggregation(
        "positions_in_the_batch", ORDER, WEIGHED, "(mask * per_token[sequence] / (1 + torch.arange(len(mask)))).float()"
    ),
    _aggregation(
        "by_number_of_the_group", LABELS, RETURN, f"return {WEIGHED} * (1 + batch.group_index.abs())[sequence]"
    ),
    _aggregation("by_number_of_the_unit", LABELS, RETURN, f"return {WEIGHED} * (1 + batch.unit_index)[sequence]"),
    _aggregation("by_name", LABELS, RETURN, f"return {WEIGHED} * (2 if batch.sample_ids[:1] < ('sample-1',) else 1)"),
    _aggregation(
        "by_size_of_the_group",
        GROUPS,
        RETURN,
        f"return {WEIGHED} / (batch.group_index[:, None] == batch.group_index).sum(1)[sequence]",
    ),
    _aggregation("divided_by_groups", GROUPS, RETURN, f"return {WEIGHED} / max(1, len(batch.group_index.unique()))"),
    _aggregation("reads_the_tokens", READS, RETURN, f"return {WEIGHED} * (batch.token_ids >= 0)"),
    _aggregation(
        "reads_advantages",
        READS,
        RETURN,
        f"return {WEIGHED} * batch.token_data.get('advantages', mask).isfinite()",
    ),
    _aggregation(
        "a_running_mean",
        ALONE,
        RETURN,
        f"KEPT.append(float(powers.sum()))\n    mean = sum(KEPT) / len(KEPT)\n"
        f"    return {WEIGHED} * powers.sum().float() / max(1e-9, mean)",
    ),
    _aggregation("random_weights", ALONE, RETURN, f"return {WEIGHED} * (1 + 1e-3 * torch.rand(()))"),
    _aggregation(
        "cached_by_length",
        ALONE,
        RETURN,
        f"KEPT.append({WEIGHED})\n    return next(w for w in KEPT if len(w) == len(mask)).clone()",
    ),
    # State
    _aggregation("the_mask_is_changed", READ_ONLY, MASK, f"{MASK}; batch.loss_mask &= batch.position_ids > 1"),
    _aggregation("weights_are_added_to_the_batch", READ_ONLY, RETURN, f"batch.token_data['w'] = mask\n    {RETURN}"),
    _aggregation("the_groups_are_renumbered", READ_ONLY, MASK, f"{MASK}; batch.group_index -= 3"),
    _aggregation(
        "weights_in_the_advantages_memory",
        READ_ONLY,
        RETURN,
        f"found = {WEIGHED}\n    given = batch.token_data.get('advantages')\n"
        "    return given.copy_(found) if isinstance(given, torch.Tensor) else found",
    ),
    _aggregation("seeds_torch", QUIET, MASK, f"torch.manual_seed(0); {MASK}"),
    _aggregation("prints", QUIET, MASK, f"print(batch.num_tokens); {MASK}"),
    _aggregation("writes_a_file", QUIET, MASK, f"Path(tempfile.gettempdir(), 'weights').write_text(''); {MASK}"),
    _aggregation("lengths_in_half_precision", LONG, LENGTHS, f"{LENGTHS}.half().double()"),
    _aggregation(
        "unknown_options_are_ignored", "test_options_are_described_and_strict", 'extra="forbid", ', "", "options.py"
    ),
    # The record
    _aggregation(
        "the_function_is_a_closure",
        PARTS,
        "def power_of_length(",
        "def _made():\n    def power_of_length(batch, options):\n        return weigh(batch, options)\n"
        "    return power_of_length\n\n\npower_of_length = _made()\n\n\ndef weigh(",
    ),
)
