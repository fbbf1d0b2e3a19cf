"""The template's kind of examples with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

ROWS = "test_rows_become_their_samples"
REASON = "test_a_bad_row_is_an_error_with_a_reason"
FORM = "test_examples_are_well_formed"
CONTENT = "test_content_tells_examples_apart"
DRAW = "test_samples_are_those_of_the_draw"
TRAINED = "test_samples_can_be_trained_on"
HAS_SAMPLES = "test_has_samples_is_true"
DRAWS = "test_draws_are_independent"
ALONE = "test_a_row_is_interpreted_by_itself"
READ_ONLY = "test_the_row_is_read_only"
STORED = "test_examples_can_be_stored"
ODD = "test_odd_rows_are_taken_or_refused"
QUIET = "test_the_process_stays_as_it_was"
IS_KIND = "test_is_a_kind_of_examples"

NO_COMPLETION = "raise DataError(f\"no completion to imitate (looked in: {', '.join(row.format.completion_columns)})\")"
BAD_WEIGHT = 'raise DataError(f"column {COLUMN!r} is {weight!r:.80}; it must be a finite number above 0")'
CHECK = "if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:"
SHOWN = "shown = row.rendered(raw, raw.completion)"
PROMPT = "row.prompt(raw, shown.prompt)"
MADE = "sample = sample_from_tokens(draw, 0, example.completion_ids, example.loss_mask)"
CUT = "example = replace(example, completion_ids=example.completion_ids[:-2], loss_mask=example.loss_mask[:-2])"
DATA = "sample.sequence_data[COLUMN] = example.weight"
CAST = "example = cast(WeightedDemonstration, draw.example)"
NUM_TOKENS = "return len(self.prompt.token_ids) + len(self.completion_ids)"
YIELD_WEIGHT = "yield repr(self.weight).encode()"
YIELD_IDS = "yield self.completion_ids.tobytes()"
SPOILED = f"KEPT.append(1)\n        if KEPT:\n            {BAD_WEIGHT}"
WITH_OPTIONS = "    def __init__(self, options):\n        pass\n\n"


def _kind(name: str, caught_by: str, old: str, new: str, file: str = "example_kind.py") -> SourceMutant:
    return SourceMutant("example_kind", name, file, old, new, caught_by)


MUTANTS = (
    # Samples
    _kind("no_weight", ROWS, DATA, "pass"),
    _kind("the_weight_is_one", ROWS, DATA, "sample.sequence_data[COLUMN] = 1.0"),
    _kind("the_mask_is_lost", ROWS, ", example.loss_mask)", ")"),
    _kind("the_last_token_is_not_imitated", ROWS, DATA, f"{DATA}; sample.loss_mask[-2:] = False"),
    _kind("two_samples", ROWS, "return [sample]", "return [sample, sample]"),
    _kind("the_end_is_cut_off", ROWS, MADE, f"{CUT}; {MADE}"),
    _kind("the_prompt_is_imitated", DRAW, DATA, f"{DATA}; sample.loss_mask[:] = True"),
    _kind("a_unit_of_all_draws", ALONE, DATA, f"{DATA}; KEPT.append(1); sample.unit_id = str(len(KEPT))"),
    _kind("an_id_of_its_own", DRAW, DATA, f"{DATA}; sample.id = draw.example.id"),
    _kind("the_group_is_the_example", DRAW, DATA, f"{DATA}; sample.group_id = draw.example.id"),
    _kind("the_second_sample_of_a_draw", DRAW, "sample_from_tokens(draw, 0,", "sample_from_tokens(draw, 1,"),
    _kind("the_completion_alone", DRAW, DATA, f"{DATA}; sample.token_ids = example.completion_ids"),
    _kind("a_mask_of_numbers", DRAW, DATA, f"{DATA}; sample.loss_mask = sample.loss_mask.astype(float)"),
    _kind("the_prompt_is_copied", DRAW, DATA, f"{DATA}; sample.prompt = replace(sample.prompt)"),
    _kind("samples_come_one_by_one", DRAW, "return [sample]", "return iter([sample])"),
    _kind("half_of_the_token_data", TRAINED, DATA, f"{DATA}; sample.token_data['w'] = np.ones(2, np.float32)"),
    _kind("the_weight_is_a_text", ROWS, DATA, "sample.sequence_data[COLUMN] = str(example.weight)"),
    _kind("samples_that_are_not_declared", HAS_SAMPLES, "has_samples=True", "has_samples=False", "plugin.py"),
    # Examples
    _kind("the_length_of_the_completion", FORM, NUM_TOKENS, "return len(self.completion_ids)"),
    _kind("the_length_of_the_prompt", FORM, NUM_TOKENS, "return len(self.prompt.token_ids)"),
    _kind("an_id_of_the_content", FORM, "return self.prompt.id", "return str(self.completion_ids.sum())"),
    _kind("the_answer_is_lost", FORM, PROMPT, f"replace({PROMPT}, ground_truth=None)"),
    _kind("columns_are_lost", FORM, PROMPT, f"replace({PROMPT}, columns={{}})"),
    _kind("a_source_of_its_own", FORM, PROMPT, f"replace({PROMPT}, data_source='acme')"),
    _kind("the_prompt_without_its_end", FORM, PROMPT, f"replace({PROMPT}, token_ids=shown.prompt.token_ids[:-1])"),
    _kind("content_without_the_weight", CONTENT, YIELD_WEIGHT, "yield b''"),
    _kind("content_of_texts", CONTENT, YIELD_WEIGHT, "yield repr(self.weight)"),
    _kind("content_by_address", CONTENT, YIELD_IDS, f"yield str(id(self)).encode(); {YIELD_IDS}"),
    _kind("a_lambda_inside", STORED, "    weight: float\n", "    weight: float\n    later: object = lambda: None\n"),
    # Bad rows
    _kind("no_completion_is_an_assertion", REASON, NO_COMPLETION, "raise AssertionError"),
    _kind("no_completion_is_empty", REASON, NO_COMPLETION, "return None"),
    _kind("any_weight", REASON, CHECK, "if False:"),
    _kind("weights_of_0", REASON, "not 0 < weight", "not 0 <= weight"),
    _kind("no_reason", REASON, BAD_WEIGHT, "raise DataError('bad')"),
    _kind("the_reason_names_the_row", REASON, BAD_WEIGHT, "raise DataError(f'{row.id}: a bad weight')"),
    _kind("weights_are_not_typed", ODD, "isinstance(weight, bool) or not isinstance(weight, int | float) or ", ""),
    _kind("infinite_weights", ODD, "< weight < math.inf", "< weight"),
    _kind("the_column_is_indexed", ROWS, "raw.columns.get(COLUMN)", "raw.columns[COLUMN]"),
    # State
    _kind("samples_are_cached", DRAWS, MADE, f"KEPT.append({MADE.partition(' = ')[2]}); sample = KEPT[0]"),
    _kind("the_example_is_the_sample", DRAWS, DATA, f"{DATA}; sample.loss_mask = example.loss_mask"),
    _kind("the_first_row_counts", ALONE, SHOWN, f"KEPT.append(raw); raw = KEPT[0]; {SHOWN}"),
    _kind(
        "a_bad_row_spoils_the_next", ALONE, BAD_WEIGHT, f"KEPT.append(1)\n        if KEPT:\n            {BAD_WEIGHT}"
    ),
    _kind("columns_are_taken_out", READ_ONLY, "raw.columns.get(COLUMN)", "raw.columns.pop(COLUMN, None)"),
    _kind("seeds_random", QUIET, SHOWN, f"random.seed(0); {SHOWN}"),
    _kind("prints", QUIET, SHOWN, f"print(raw.prompt); {SHOWN}"),
    _kind(
        "a_factory_with_options",
        IS_KIND,
        "    def build(",
        "    def __init__(self, options):\n        pass\n\n    def build(",
    ),
    _kind("samples_has_another_name", IS_KIND, "def samples(", "def make_samples("),
)
