"""The templates of schedules, step policies and sample filters with one fault each, and the contract test that must
fail.
"""

from __future__ import annotations

from source_mutants import SourceMutant

from chatlearn_core.plugins.records import Kind

METHODS = "test_has_the_methods_of_its_protocol"
BAD_OPTIONS = "test_bad_options_are_refused"
SAME = "test_the_same_questions_get_the_same_answers"
PROCESS = "test_another_process_decides_the_same"
NOTHING_SHARED = "test_objects_share_nothing"
READ_ONLY = "test_a_question_is_read_only"
AS_IT_WAS = "test_the_process_stays_as_it_was"
CONTINUES = "test_a_restored_one_continues"
COPY = "test_the_state_is_a_copy"
DAMAGED = "test_a_damaged_state_is_refused"
HEAVY = "test_nothing_heavy_is_imported_before_a_run"
FORBID = 'model_config = ConfigDict(extra="forbid", frozen=True)'
STRICT = "test_options_are_described_and_strict"

# Schedules
EXPECTED = "test_values_are_those_expected"
FINITE = "test_values_are_finite_numbers"
BOUNDS = "test_values_stay_within_the_bounds"
ALONE = "test_a_value_depends_on_the_step_alone"
VALUE = "return options.start * (1.0 - share) + options.end * share"
PROGRESS = "progress = min(1.0, max(0.0, progress))"
OPTIONS = "options = self.options"

# Step policies
OF_CASES = "test_decisions_are_those_of_the_cases"
VALID = "test_decisions_are_valid"
MAPPING = "test_metrics_may_be_of_any_mapping"
MISSING = "test_missing_metrics_are_taken_or_refused"
ODD = "test_odd_metrics_do_no_harm"
REACTS = "test_it_still_reacts_after_an_odd_step"
TOKENS = "tokens = metrics.get(self.options.metric)"
NONE = "if tokens is None or not math.isfinite(tokens):"
USED = "self._used += tokens"
DECISION = "metrics={USED: self._used},"
SPENT = "spent = self._used >= self.options.tokens"
STOP = 'stop=f"{self._used:g} of {self.options.tokens} tokens are used" if spent else None,'
USED_STATE = 'return {"used": self._used}'
LOADED = "self._used = used"

# Sample filters
TREATED = "test_samples_of_the_cases_are_treated_as_expected"
GIVEN = "test_verdicts_are_on_samples_that_it_was_given"
COUNTED = "test_reasons_can_be_counted"
REWARDS = "test_rewards_are_valid"
SEQUENCE = "test_any_sequence_of_samples_is_taken"
ORDER = "test_the_order_of_samples_does_not_matter"
NO_SAMPLES = "test_no_samples_no_verdicts"
ODD_SAMPLES = "test_odd_samples_do_no_harm"
DECLARED = "test_reads_only_what_it_declares"
EXCLUDED = '"""Sample id -> reason."""'
COUNT = "self._samples += len(samples)"
VERDICTS = "return {sample.id: REASON for sample in samples if sample.num_completion_tokens > limit}"
FILTER_STATE = 'return {"tokens": self._tokens, "samples": self._samples}'
FILTER_LOADED = "self._tokens, self._samples = tokens, samples"
STATE = "    def state_dict(self) -> dict[str, Any]:"
OF_SOME = "for s in samples if s.reward and s.reward.value == -2.0"
DAMAGE = "except (KeyError, TypeError, ValueError) as error:"


def _mutants(kind: Kind, *faults: tuple[str, str, str, str]) -> tuple[SourceMutant, ...]:
    """Mutants of a template, whose module has the name of the kind: (name, test that fails, old, new)."""
    return tuple(SourceMutant(kind, name, f"{kind}.py", old, new, caught_by) for name, caught_by, old, new in faults)


def _with_rewards(name: str, caught_by: str, body: str) -> tuple[str, str, str, str]:
    """A filter with a method ``rewards``."""
    method = f"    def rewards(self, samples):\n        {body}\n\n"
    return name, caught_by, STATE, method + STATE


MUTANTS = (
    SourceMutant("schedule", "other_options_are_fine", "options.py", FORBID, "", STRICT),
    SourceMutant(
        "schedule",
        "no_length_is_needed",
        "options.py",
        "if self.last_step <= self.first_step:",
        "if False:",
        BAD_OPTIONS,
    ),
    SourceMutant("schedule", "step_zero_is_fine", "options.py", "Field(1, ge=1,", "Field(1,", BAD_OPTIONS),
    SourceMutant("schedule", "options_import_torch", "options.py", FORBID, FORBID + "  # strict", HEAVY),
    *_mutants(
        "schedule",
        ("no_value", METHODS, "def value(", "def at("),
        (
            "steps_from_zero",
            EXPECTED,
            PROGRESS,
            f"progress += 1 / (options.last_step - options.first_step)\n        {PROGRESS}",
        ),
        ("a_straight_line", EXPECTED, "share = (1.0 - math.cos(math.pi * progress)) / 2.0", "share = progress"),
        ("ends_are_swapped", EXPECTED, VALUE, "return options.end * (1.0 - share) + options.start * share"),
        (
            "one_step_too_late",
            EXPECTED,
            "(options.last_step - options.first_step)",
            "(options.last_step + 1 - options.first_step)",
        ),
        ("whole_numbers", EXPECTED, VALUE, f"return int({VALUE.removeprefix('return ')} - 0.5)"),
        ("it_changes_before_the_start", EXPECTED, PROGRESS, "progress = min(1.0, progress)"),
        ("it_overshoots", BOUNDS, VALUE, f"{VALUE} - (0.001 if step == 40 else 0.0)"),
        ("it_grows_for_ever", FINITE, VALUE, f"{VALUE} if step < 10_000 else float('inf')"),
        ("not_a_number_at_last", FINITE, VALUE, f"{VALUE} if step < 10_000 else float('nan')"),
        ("a_tensor", FINITE, VALUE, f"return torch.tensor({VALUE.removeprefix('return ')})"),
        ("a_narrow_number", FINITE, VALUE, f"return np.float32({VALUE.removeprefix('return ')})"),
        ("no_number", FINITE, VALUE, f"{VALUE} if step != 4 else None"),
        ("it_overflows", FINITE, OPTIONS, f"{OPTIONS}\n        math.exp(step / 1000)"),
        (
            "it_counts_its_calls",
            ALONE,
            OPTIONS,
            f"self.calls = getattr(self, 'calls', 0) + 1\n        step = self.calls\n        {OPTIONS}",
        ),
        (
            "it_never_falls_back",
            ALONE,
            OPTIONS,
            f"step = self.last = max(step, getattr(self, 'last', 0))\n        {OPTIONS}",
        ),
        (
            "the_first_value_is_kept",
            ALONE,
            OPTIONS,
            "self.kept = getattr(self, 'kept', {}) or {step % 8: step}\n"
            f"        step = self.kept.setdefault(step % 8, step)\n        {OPTIONS}",
        ),
        ("the_driver_has_another_value", SAME, VALUE, f"{VALUE} + random.random() * 1e-3"),
        ("numpys_generator", SAME, VALUE, f"{VALUE} + np.random.rand() * 1e-3"),
        ("the_hash_of_a_text", PROCESS, VALUE, f"{VALUE} * (1.0 + hash('acme') % 1000 * 1e-16 * 1e4)"),
        ("the_id_of_the_process", PROCESS, VALUE, f"{VALUE} + os.getpid() * 1e-14"),
        (
            "all_share_one_step",
            NOTHING_SHARED,
            OPTIONS,
            f"KEPT.append(step)\n        step += KEPT.count(step) > 1\n        {OPTIONS}",
        ),
        ("seeds_everything", AS_IT_WAS, OPTIONS, f"{OPTIONS}\n        random.seed(step)"),
        ("prints", AS_IT_WAS, OPTIONS, f"{OPTIONS}\n        print(step)"),
        ("writes_a_file", AS_IT_WAS, OPTIONS, f"{OPTIONS}\n        Path(tempfile.mkdtemp(), 'step').write_text('')"),
    ),
    SourceMutant(
        "step_policy",
        "no_tokens_are_needed",
        "options.py",
        "tokens: int = Field(ge=1,",
        "tokens: int = Field(",
        BAD_OPTIONS,
    ),
    SourceMutant("step_policy", "tokens_have_a_default", "options.py", "Field(ge=1,", "Field(9, ge=1,", BAD_OPTIONS),
    SourceMutant("step_policy", "options_import_torch", "options.py", FORBID, FORBID + "  # strict", HEAVY),
    *_mutants(
        "step_policy",
        ("no_state", METHODS, "def state_dict(", "def state("),
        ("nothing_is_counted", OF_CASES, USED, "self._used = tokens"),
        ("it_stops_too_late", OF_CASES, SPENT, "spent = self._used > self.options.tokens"),
        ("it_never_stops", OF_CASES, SPENT, "spent = False"),
        ("it_stops_at_once", OF_CASES, SPENT, "spent = True"),
        ("the_metric_is_lost", OF_CASES, DECISION, ""),
        ("the_sampling_changes", OF_CASES, DECISION, f"{DECISION} sampling={{'max_tokens': 8}},"),
        ("it_stops_once", OF_CASES, SPENT, "spent = self.options.tokens <= self._used < self.options.tokens + 5"),
        ("the_name_is_taken", VALID, 'USED = "acme/used_tokens"', 'USED = "loss"'),
        (
            "a_plain_text",
            VALID,
            "return Decision(",
            "if step == 3:\n            return 'stop'\n        return Decision(",
        ),
        ("two_lines", VALID, STOP, STOP.replace("tokens are used", "tokens are\\nused")),
        ("the_reason_is_true", VALID, STOP, "stop=spent or None,"),
        ("the_temperature_changes", VALID, DECISION, f"{DECISION} sampling={{'temperature': 0.5}},"),
        ("no_tokens_at_all", VALID, DECISION, f"{DECISION} sampling={{'max_tokens': 0}},"),
        ("a_tensor", VALID, DECISION, "metrics={USED: torch.tensor(self._used)},"),
        ("a_dict_is_expected", MAPPING, TOKENS, f"metrics.update({{}})\n        {TOKENS}"),
        ("the_type_is_compared", MAPPING, NONE, f"{NONE[:-1]} or type(metrics) is not dict:"),
        ("a_missing_metric", MISSING, TOKENS, "tokens = metrics[self.options.metric]"),
        ("another_missing_metric", MISSING, TOKENS, f"{TOKENS}\n        metrics['loss']"),
        ("metrics_are_expected", MISSING, TOKENS, f"{TOKENS}\n        max(metrics.values())"),
        (
            "an_error_that_names_nothing",
            MISSING,
            NONE,
            "if tokens is None:\n            raise CheckpointError('a metric is missing')\n        " + NONE,
        ),
        ("odd_numbers_are_counted", ODD, NONE, "if tokens is None:"),
        ("whole_numbers_of_tokens", ODD, NONE, f"tokens = None if tokens is None else int(tokens)\n        {NONE}"),
        ("odd_numbers_are_errors", ODD, NONE, f"assert tokens is None or math.isfinite(tokens)\n        {NONE}"),
        ("only_nan_is_odd", ODD, NONE, "if tokens is None or math.isnan(tokens):"),
        (
            "it_gives_up",
            REACTS,
            NONE,
            "if tokens is not None and not math.isfinite(tokens):\n"
            f"            self.options = self.options.model_copy(update={{'metric': ''}})\n        {NONE}",
        ),
        (
            "the_metrics_are_changed",
            READ_ONLY,
            TOKENS,
            f"{TOKENS}\n        isinstance(metrics, dict) and metrics.pop('loss', None)",
        ),
        ("a_metric_is_added_to_the_step", READ_ONLY, USED, f"{USED}\n        metrics |= {{'used': 1.0}}"),
        ("random_tokens", SAME, USED, f"{USED} + random.random()"),
        ("the_clock", SAME, USED, f"{USED} + time.perf_counter() % 1e-3"),
        ("the_hash_of_a_name", PROCESS, USED, f"{USED} + hash(self.options.metric) % 97 * 1e-9"),
        ("all_share_one_count", NOTHING_SHARED, USED, "KEPT.append(tokens)\n        self._used = sum(KEPT)"),
        ("prints", AS_IT_WAS, USED, f"{USED}\n        print(step)"),
        ("seeds_everything", AS_IT_WAS, USED, f"{USED}\n        random.seed(step)"),
        ("writes_a_file", AS_IT_WAS, USED, f"{USED}\n        Path(tempfile.mkdtemp(), 'used').write_text('')"),
        ("the_state_is_empty", CONTINUES, USED_STATE, "return {'used': 0.0}"),
        ("the_state_is_rounded", CONTINUES, USED_STATE, "return {'used': self._used // 10 * 10}"),
        ("the_state_is_added", CONTINUES, LOADED, "self._used += used"),
        ("the_larger_state_wins", CONTINUES, LOADED, "self._used = max(self._used, used)"),
        ("a_tensor_in_the_state", CONTINUES, USED_STATE, "return {'used': torch.tensor(self._used)}"),
        ("a_state_is_loaded_once", CONTINUES, LOADED, "self._used = self._used or used"),
        ("the_state_counts", COPY, USED_STATE, "self._used += 1.0\n        return {'used': self._used}"),
        (
            "the_state_is_not_a_copy",
            COPY,
            USED_STATE,
            "self.held = getattr(self, 'held', {})\n        self.held['used'] = self._used\n        return self.held",
        ),
        ("a_missing_entry", DAMAGED, DAMAGE, DAMAGE.replace("KeyError, ", "")),
        ("a_wrong_type", DAMAGED, DAMAGE, DAMAGE.replace("TypeError, ", "")),
        ("a_wrong_text", DAMAGED, DAMAGE, DAMAGE.replace(", ValueError", "")),
        ("an_empty_state_is_fine", DAMAGED, 'state["used"]', 'state.get("used", 0.0)'),
    ),
    SourceMutant("sample_filter", "no_factor_is_needed", "options.py", "Field(4.0, gt=1,", "Field(4.0,", BAD_OPTIONS),
    SourceMutant("sample_filter", "options_import_torch", "options.py", FORBID, FORBID + "  # strict", HEAVY),
    *_mutants(
        "sample_filter",
        ("nothing_is_excluded", TREATED, VERDICTS, "return {}"),
        (
            "everything_is_excluded",
            TREATED,
            VERDICTS,
            "return dict.fromkeys((sample.id for sample in samples), REASON)",
        ),
        ("the_short_are_excluded", TREATED, VERDICTS, VERDICTS.replace("> limit", "< limit / 8")),
        (
            "prompts_count",
            TREATED,
            COUNT,
            f"{COUNT}\n        self._tokens += sum(s.num_prompt_tokens for s in samples)",
        ),
        (
            "whole_groups_are_excluded",
            TREATED,
            VERDICTS,
            "long = {s.group_id for s in samples if s.num_completion_tokens > limit}\n"
            "        return {s.id: REASON for s in samples if s.group_id in long}",
        ),
        _with_rewards(
            "rewards_of_all", TREATED, "return {s.id: replace(s.reward, value=0.0) for s in samples if s.reward}"
        ),
        ("groups_are_named", GIVEN, VERDICTS, VERDICTS.replace("sample.id", "sample.group_id")),
        (
            "earlier_samples_are_named",
            GIVEN,
            VERDICTS,
            f"found = {VERDICTS.removeprefix('return ')}\n"
            "        self.kept = getattr(self, 'kept', {}) | found\n        return self.kept",
        ),
        ("a_list_of_ids", GIVEN, VERDICTS, "return [s.id for s in samples if s.num_completion_tokens > limit]"),
        ("the_reason_names_the_sample", COUNTED, VERDICTS, VERDICTS.replace("REASON", 'f"{REASON}: {sample.id}"')),
        ("the_reason_names_the_group", COUNTED, VERDICTS, VERDICTS.replace("REASON", 'f"{REASON}: {sample.group_id}"')),
        ("an_empty_reason", COUNTED, 'REASON = "too long for its run"', 'REASON = ""'),
        ("two_lines", COUNTED, 'REASON = "too long for its run"', 'REASON = "too long\\nfor its run"'),
        ("a_number_of_reasons", COUNTED, VERDICTS, VERDICTS.replace("REASON", "sample.num_completion_tokens")),
        _with_rewards(
            "a_reward_that_is_no_number", REWARDS, f"return {{s.id: replace(s.reward, value=float('nan')) {OF_SOME}}}"
        ),
        _with_rewards("a_plain_number", REWARDS, f"return {{s.id: 1.0 {OF_SOME}}}"),
        _with_rewards(
            "values_of_too_few_tokens",
            REWARDS,
            f"return {{s.id: replace(s.reward, token_values=np.zeros(1)) {OF_SOME} and len(s.token_ids) > 4}}",
        ),
        _with_rewards(
            "rewards_of_the_excluded",
            GIVEN,
            "KEPT.extend(samples)\n        return {s.id: s.reward for s in KEPT if s.reward}",
        ),
        ("a_list_is_expected", SEQUENCE, EXCLUDED, f"{EXCLUDED}\n        samples = samples + []"),
        (
            "a_tuple_is_nothing",
            SEQUENCE,
            EXCLUDED,
            f"{EXCLUDED}\n        samples = samples if isinstance(samples, list) else []",
        ),
        (
            "the_first_sample_decides",
            ORDER,
            VERDICTS,
            VERDICTS.replace("> limit", "> limit * (1 + (sample is samples[0]))"),
        ),
        (
            "one_of_each_group",
            ORDER,
            VERDICTS,
            "found = {s.group_id: s.id for s in samples if s.num_completion_tokens > limit / 2}\n"
            "        return {i: REASON for i in found.values() if len(samples) > 4 or '#2' in i}",
        ),
        ("samples_are_expected", NO_SAMPLES, EXCLUDED, f"{EXCLUDED}\n        samples[0]"),
        ("a_mean_of_nothing", NO_SAMPLES, "max(1, self._samples)", "self._samples"),
        ("a_reward_is_expected", ODD_SAMPLES, COUNT, f"{COUNT}\n        [sample.reward.value for sample in samples]"),
        (
            "a_value_is_expected",
            ODD_SAMPLES,
            COUNT,
            f"{COUNT}\n        [s.reward.value + 1 for s in samples if s.reward]",
        ),
        ("a_turn_is_expected", ODD_SAMPLES, COUNT, f"{COUNT}\n        [sample.turns[-1] for sample in samples]"),
        (
            "tokens_are_expected",
            ODD_SAMPLES,
            COUNT,
            f"{COUNT}\n        [1 / sample.num_completion_tokens for sample in samples]",
        ),
        ("reads_tokens", DECLARED, COUNT, f"{COUNT}\n        [int(sample.token_ids[-1]) for sample in samples]"),
        ("reads_texts", DECLARED, COUNT, f"{COUNT}\n        [turn.text.strip() for s in samples for turn in s.turns]"),
        (
            "reads_data_of_tokens",
            DECLARED,
            COUNT,
            f"{COUNT}\n        [s.token_data['generator_logprobs'].sum() for s in samples if s.turns]",
        ),
        (
            "samples_are_marked",
            READ_ONLY,
            COUNT,
            f"{COUNT}\n        for sample in samples:\n            sample.exclusion = REASON",
        ),
        (
            "data_are_added",
            READ_ONLY,
            COUNT,
            f"{COUNT}\n        for sample in samples:\n            sample.sequence_data['seen'] = 1.0",
        ),
        (
            "rewards_are_changed",
            READ_ONLY,
            COUNT,
            f"{COUNT}\n        for s in samples:\n            s.reward and s.reward.components.clear()",
        ),
        (
            "the_samples_are_sorted",
            READ_ONLY,
            COUNT,
            f"{COUNT}\n        isinstance(samples, list) and samples.sort(key=lambda s: len(s.token_ids))",
        ),
        ("random_samples", SAME, VERDICTS, VERDICTS.replace("> limit", "> limit * random.uniform(0.2, 2)")),
        ("the_hash_of_an_id", PROCESS, VERDICTS, VERDICTS.replace("> limit", "> limit or not hash(sample.id) % 3")),
        (
            "a_set_of_samples",
            PROCESS,
            VERDICTS,
            "ids = {s.id for s in samples}\n        return {i: REASON for i in list(ids)[:1]}",
        ),
        (
            "all_share_one_mean",
            NOTHING_SHARED,
            COUNT,
            f"KEPT.extend(s.num_completion_tokens for s in samples)\n        {COUNT}\n        self._tokens = sum(KEPT)",
        ),
        ("prints", AS_IT_WAS, COUNT, f"{COUNT}\n        print(len(samples))"),
        ("seeds_everything", AS_IT_WAS, COUNT, f"{COUNT}\n        random.seed(0)"),
        ("writes_a_file", AS_IT_WAS, COUNT, f"{COUNT}\n        Path(tempfile.mkdtemp(), 'lengths').write_text('')"),
        ("the_state_is_empty", CONTINUES, FILTER_STATE, "return {'tokens': 0, 'samples': 0}"),
        ("half_of_the_state", CONTINUES, FILTER_LOADED, "self._tokens = tokens"),
        (
            "the_state_is_added",
            CONTINUES,
            FILTER_LOADED,
            "self._tokens, self._samples = self._tokens + tokens, self._samples + samples",
        ),
        (
            "an_array_in_the_state",
            CONTINUES,
            FILTER_STATE,
            "return {'tokens': np.int64(self._tokens), 'samples': self._samples}",
        ),
        ("the_state_counts", COPY, FILTER_STATE, f"self._samples += 1\n        {FILTER_STATE}"),
        (
            "the_state_is_not_a_copy",
            COPY,
            FILTER_STATE,
            "self.held = getattr(self, 'held', {})\n"
            "        self.held.update(tokens=self._tokens, samples=self._samples)\n        return self.held",
        ),
        ("a_missing_entry", DAMAGED, DAMAGE, DAMAGE.replace("KeyError, ", "")),
        ("a_wrong_type", DAMAGED, DAMAGE, DAMAGE.replace("TypeError, ", "")),
        ("a_wrong_text", DAMAGED, DAMAGE, DAMAGE.replace(", ValueError", "")),
        (
            "an_empty_state_is_fine",
            DAMAGED,
            'int(state["tokens"]), int(state["samples"])',
            'int(state.get("tokens", 0)), int(state.get("samples", 0))',
        ),
        ("the_state_is_not_loaded", CONTINUES, "def load_state_dict(", "def load_state("),
    ),
    SourceMutant(
        "sample_filter",
        "no_state",
        "sample_filter.py",
        "def load_state_dict(",
        "def load_state(",
        METHODS,
        (("class AcmeFilter(SampleFilter):", "class AcmeFilter:"),),
    ),
)
