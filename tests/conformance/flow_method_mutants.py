"""The template's flow method with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

RECORD = "test_the_record_is_consistent"
ARGUMENTS = "test_arguments_import_no_engine"
STRICT = "test_options_are_described_and_strict"
CALL = "test_a_flow_can_make_the_call"
STORES = "test_stores_what_is_declared_and_nothing_else"
NAMED = "test_data_are_named_after_the_role_or_the_argument"
ROLES = "test_two_roles_do_not_mix"
EMPTY = "test_a_sample_without_tokens_is_passed_over"
TIMING = "test_when_samples_come_does_not_matter"
AGAIN = "test_the_same_samples_get_the_same"
EARLIER = "test_samples_of_an_earlier_call_are_left_alone"
OUTPUTS = "test_outputs_are_those_of_the_role"
TOKENS = "test_the_role_gets_the_tokens_that_are_declared"
EXPECTED = "test_values_are_as_expected"
ERROR = "test_an_error_of_the_role_is_not_hidden"
ODD = "test_odd_values_are_refused"
ROWS = "test_missing_outputs_are_refused"
QUIET = "test_the_process_stays_as_it_was"

COMPUTE = "await compute(call, requests)  # asks the role for the outputs of the record, and checks and stores them"
NAMES = 'logprobs, mean = call.node.output_fields["logprobs"], call.node.fields[-1]'
SAMPLES = "samples = [sample for request in requests for sample in request.samples if sample.loss_mask.any()]"
IF_NONE = "if not samples:\n        return"
OF_SAMPLE = "of_sample = fetched.token_data[logprobs][sample.loss_mask]"
STORE = "sample.sequence_data[mean] = float(np.mean(of_sample, dtype=np.float64))"
VALUE = "float(np.mean(of_sample, dtype=np.float64))"
ADDS = 'adds=("{name}_acme",),'
GRANULARITY = 'granularity="batch",'
UNCHECKED = """batch = call.packer.pack([s for r in requests for s in r.samples if s.loss_mask.any()])
    from chatlearn_core.executor.flow_calls import output_request
    found = await call.runtime.trainer(call.node.role).compute(batch, output_request(call.node, call.sampling))
    rows = call.packer.unpack(found["logprobs"], batch, call.node.output_fields["logprobs"])
    for s, row in zip([s for r in requests for s in r.samples if s.loss_mask.any()], rows, strict=True):
        s.token_data[call.node.output_fields["logprobs"]] = row"""
HIDDEN = f"""try:
        {COMPUTE}
    except Exception:
        for r in requests:
            r.filled.token_data[call.node.output_fields["logprobs"]] = np.zeros(len(r.filled.token_ids), np.float32)"""
EXCLUDES = f"""try:
        {COMPUTE}
    except Exception as error:
        for r in requests:
            r.filled.exclusion = f"{{r.sample_id}}: {{error}}"
        return"""
OTHER_ERROR = f"""try:
        {COMPUTE}
    except Exception as error:
        raise RuntimeError("no logprobs") from error"""
DIVIDED = """async def divided(call, requests):
    from acme_plugin.flow_method import mean_logprobs
    await mean_logprobs(call, requests)
    for request in requests:
        if request.filled.loss_mask.any():
            request.filled.sequence_data[call.node.fields[-1]] /= len(requests)


"""


def _method(name: str, caught_by: str, old: str, new: str, file: str = "flow_method.py") -> SourceMutant:
    return SourceMutant("flow_method", name, file, old, new, caught_by)


MUTANTS = (
    # Values
    _method("the_mean_over_all_tokens", EXPECTED, OF_SAMPLE, OF_SAMPLE.replace("[sample.loss_mask]", "")),
    _method("the_sum", EXPECTED, "np.mean(of_sample", "np.sum(of_sample"),
    _method("the_last_token", EXPECTED, VALUE, "float(of_sample[-1])"),
    _method("rounded", EXPECTED, VALUE, f"round({VALUE}, 2)"),
    _method("the_mean_of_the_batch", EXPECTED, VALUE, "float(np.mean([p.token_data[logprobs].mean() for p in plain]))"),
    _method(
        "logprobs_are_probabilities",
        OUTPUTS,
        STORE,
        f"{STORE}; sample.token_data[logprobs] = np.exp(fetched.token_data[logprobs])",
    ),
    _method(
        "logprobs_of_the_next_token",
        OUTPUTS,
        STORE,
        f"{STORE}; sample.token_data[logprobs] = np.roll(fetched.token_data[logprobs], -1)",
    ),
    _method("another_output", STORES, 'outputs=("logprobs",)', 'outputs=("entropy",)', "plugin.py"),
    # What is stored
    _method("more_than_is_declared", STORES, STORE, f"{STORE}; sample.sequence_data['acme'] = 1.0"),
    _method("less_than_is_declared", STORES, STORE, "pass"),
    _method("another_name", STORES, STORE, STORE.replace("[mean]", "[mean + '_mean']")),
    _method("nothing_is_declared", STORES, ADDS, "", "plugin.py"),
    _method(
        "the_mask_is_narrowed",
        STORES,
        STORE,
        f"{STORE}; sample.loss_mask = sample.loss_mask & (of_sample.min() < 0)\n        sample.loss_mask[-1] = False",
    ),
    _method("tokens_are_cut", STORES, STORE, f"{STORE}; sample.token_ids = sample.token_ids[:-1]"),
    _method("turns_are_dropped", STORES, STORE, f"{STORE}; sample.turns = ()"),
    _method("samples_are_excluded", STORES, STORE, f"{STORE}; sample.exclusion = 'unlikely'"),
    _method(
        "generator_logprobs_are_replaced",
        STORES,
        STORE,
        f"{STORE}; sample.token_data['generator_logprobs'] = fetched.token_data[logprobs]",
    ),
    _method("policy_versions_are_dropped", STORES, STORE, f"{STORE}; sample.token_data.pop('policy_version', None)"),
    _method("a_unit_of_all", STORES, STORE, f"{STORE}; sample.unit_id = 'all'"),
    _method("nan_is_stored", STORES, VALUE, "float('nan')"),
    _method("the_name_is_ignored", NAMED, NAMES, NAMES.replace("call.node.fields[-1]", "f'{call.node.role}_acme'")),
    _method("one_name_for_all_roles", STORES, NAMES, NAMES.replace("call.node.fields[-1]", "'acme'")),
    _method(
        "values_of_the_role_before",
        ROLES,
        VALUE,
        f"KEPT.append((sample.id, {VALUE})) or next(v for n, v in KEPT if n == sample.id)",
    ),
    _method("empty_samples_get_a_mean", EMPTY, SAMPLES, SAMPLES.replace(" if sample.loss_mask.any()", "")),
    _method(
        "failed_samples_are_renamed",
        EMPTY,
        SAMPLES,
        "[setattr(r.filled, 'exclusion', 'no tokens') for "
        f"r in requests if not r.filled.loss_mask.any()]\n    {SAMPLES}",
    ),
    # State and timing
    SourceMutant(
        "flow_method",
        "divided_by_the_samples_of_the_call",
        "plugin.py",
        GRANULARITY,
        'granularity="sample",',
        TIMING,
        also=(("flow_method:mean_logprobs", "plugin:divided"), ("@hookimpl", f"{DIVIDED}@hookimpl")),
    ),
    _method("a_running_mean", AGAIN, VALUE, f"KEPT.append({VALUE}) or sum(KEPT) / len(KEPT)"),
    _method("random_noise", AGAIN, VALUE, f"{VALUE} + random.random()"),
    _method(
        "earlier_samples_are_updated",
        EARLIER,
        STORE,
        f"{STORE}; KEPT.append(sample); KEPT[0].sequence_data[mean] -= 1.0",
    ),
    _method(
        "tokens_in_reverse",
        TOKENS,
        COMPUTE,
        f"[setattr(s, 'token_ids', s.token_ids[::-1].copy()) for r in requests for s in r.samples]\n    {COMPUTE}",
    ),
    # Errors
    _method("errors_are_zeros", ERROR, COMPUTE, HIDDEN),
    _method("reasons_name_their_samples", ERROR, COMPUTE, EXCLUDES),
    _method("another_error", ERROR, COMPUTE, OTHER_ERROR),
    _method("values_are_not_checked", ODD, COMPUTE, UNCHECKED),
    _method("nan_becomes_0", ODD, COMPUTE, UNCHECKED.replace("= row", "= np.nan_to_num(row)")),
    # The record and the arguments
    _method("an_ordinary_function", RECORD, "async def mean_logprobs", "def mean_logprobs"),
    _method("an_output_that_nobody_describes", RECORD, 'outputs=("logprobs",)', 'outputs=("logprob",)', "plugin.py"),
    _method("one_name_twice", RECORD, ADDS, 'adds=("{name}_acme", "{name}_acme"),', "plugin.py"),
    _method("a_name_with_a_space", RECORD, ADDS, 'adds=("{name} acme",),', "plugin.py"),
    _method("a_method_of_rewards", RECORD, 'name="trainer.acme"', 'name="reward.acme"', "plugin.py"),
    _method(
        "an_argument_called_name", RECORD, "    temperature:", "    name: str = ''\n    temperature:", "arguments.py"
    ),
    _method(
        "arguments_that_import_transformers",
        ARGUMENTS,
        "from pydantic import",
        "import transformers\nfrom pydantic import",
        "arguments.py",
    ),
    _method(
        "arguments_that_print",
        ARGUMENTS,
        "\n\nclass AcmeArguments",
        "\nprint('loaded')\n\n\nclass AcmeArguments",
        "arguments.py",
    ),
    _method("any_argument", STRICT, 'extra="forbid", ', "", "arguments.py"),
    _method("no_temperature", "test_a_flow_can_make_the_call", "    temperature:", "    heat:", "arguments.py"),
    _method("seeds_random", QUIET, NAMES, f"random.seed(0); {NAMES}"),
    _method("prints", QUIET, NAMES, f"print(len(requests)); {NAMES}"),
    _method("a_file_of_means", QUIET, NAMES, f"Path(tempfile.gettempdir(), 'means').write_text(''); {NAMES}"),
)
