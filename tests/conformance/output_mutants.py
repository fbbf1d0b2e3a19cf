"""The template's output with one fault each, in its record or its computation, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

RECORD = "test_the_record_is_consistent"
PASS = "test_values_pass"
PACKING = "test_values_do_not_depend_on_packing"
MASKED = "test_masked_is_true"
BOUNDS = "test_the_bounds_are_those_of_the_values"
ARGUMENTS = "test_arguments_of_a_request_are_asked_for"
FLOWS = "test_flows_that_ask_for_it_can_name_its_arguments"
QUIET = "test_the_process_stays_as_it_was"

PER, SHAPE, DTYPE, HEAD = 'per="token",', "shape=(),", 'dtype="float",', 'head="lm",'
IS_MASKED, AT_LEAST = "masked=True,", "at_least=0.0,"
VALUES = "first, second = (logits / temperature).topk(2, -1).values.unbind(-1)"
RETURN = "return (first - second).masked_fill(~loss_mask, 0.0)"


def _record(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("output", name, "plugin.py", old, new, caught_by)


def _values(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("output", name, "output.py", old, new, caught_by)


MUTANTS = (
    _record("a_name_with_a_dash", RECORD, '            name="acme",', '            name="acme-margin",'),
    _record(
        "no_summary",
        RECORD,
        'summary="Nats between the two likeliest tokens at each position.",\n            per',
        "per",
    ),
    _record("an_unknown_head", RECORD, HEAD, 'head="language",'),
    _record("an_unknown_type", RECORD, DTYPE, 'dtype="float32",'),
    _record("an_unknown_unit", RECORD, PER, 'per="sample",'),
    _record("a_size_of_0", RECORD, SHAPE, "shape=(0,),"),
    _record("a_list_of_sizes", RECORD, SHAPE, "shape=[],"),
    _record("bounds_the_wrong_way_round", RECORD, AT_LEAST, "at_least=0.0, at_most=-1.0,"),
    _record("an_infinite_bound", RECORD, AT_LEAST, 'at_least=0.0, at_most=float("inf"),'),
    _record("an_argument_with_a_space", RECORD, SHAPE, 'shape=(), from_batch=("some ids",),'),
    _record("one_for_each_sequence", PASS, PER, 'per="sequence",'),
    _record("two_numbers_a_token", PASS, SHAPE, "shape=(2,),"),
    _record("any_numbers_a_token", PASS, SHAPE, "shape=(None,),"),
    _record("whole_numbers", PASS, DTYPE, 'dtype="int",'),
    _record("at_most_0", PASS, AT_LEAST, "at_most=0.0,"),
    _record("a_bound_too_high", PASS, AT_LEAST, "at_least=0.5,"),
    _record("a_bound_too_low_above", PASS, AT_LEAST, "at_least=0.0, at_most=1.0,"),
    _record("a_size_of_an_argument", PASS, SHAPE, 'shape=("k",),'),
    _record("every_token_counts", MASKED, IS_MASKED, "masked=False,"),
    SourceMutant(
        "output",
        "reads_ids_that_no_flow_gives",
        "plugin.py",
        SHAPE,
        'shape=("ids",), from_batch=("ids",),',
        FLOWS,
        also=(('            name="acme",', '            name="entropy",'),),
    ),
    _values("prompts_have_margins", MASKED, RETURN, "return first - second"),
    _values("margins_below_0", PASS, RETURN, RETURN.replace("first - second", "second - first")),
    _values("slightly_below_0", BOUNDS, RETURN, RETURN.replace("first - second", "0 * first - 1e-5")),
    _values("infinite_margins", PASS, RETURN, RETURN.replace("first - second", "(first - second) / 0")),
    _values("in_a_column", PASS, RETURN, f"{RETURN}[:, None]"),
    _values("a_list", PASS, RETURN, f"{RETURN}.tolist()"),
    _values("rounded_to_whole_numbers", PASS, RETURN, f"{RETURN}.long()"),
    _values("without_the_last_token", PASS, RETURN, f"{RETURN}[:-1]"),
    _values("shifted_by_one", MASKED, RETURN, f"{RETURN}.roll(1)"),
    _values("relative_to_the_batch", PACKING, VALUES, f"{VALUES}; first = first + (first - second).sum()"),
    _values(
        "the_mean_of_the_batch",
        PACKING,
        RETURN,
        "return (first - second).mean().expand(len(logits)).masked_fill(~loss_mask, 0.0) if len(logits) else first",
    ),
    _values("seeds_torch", QUIET, VALUES, f"torch.manual_seed(0); {VALUES}"),
    _values("prints", QUIET, VALUES, f"print(temperature); {VALUES}"),
)
