"""The template's generator with one fault each, as an author might make it, and the contract test that must fail.

Names that mutants use and the template does not import are added by the test.

Three faults that were tried are not here, because no caller can see them. A generator that notices an abort at a token
of its own choice and drops the last one returns what an abort one token earlier returns. One that ignores
``resume_from`` under unchanged weights samples the same tokens again (``resume_begins_again`` is caught after a sync).
One that counts its pauses, but resumes at the first ``resume``, behaves as one that does not count.
"""

from __future__ import annotations

from source_mutants import SourceMutant

MIXED = "test_draws_of_a_mixed_batch_follow_each_requests_distribution"
SUCCESSIVE = "test_successive_tokens_are_drawn_independently"
TIES = "test_near_ties_are_decided_as_asked"
GREEDY = "test_greedy_equals_a_plain_forward"
BASIS = "test_logprobs_are_of_the_stated_basis"
GROUP = "test_members_of_a_group_differ"
SEED = "test_the_seed_alone_decides"
BATCHED = "test_seeds_decide"
ENDS = "test_the_end_of_sequence_ends_a_completion"
STOP_TOKEN = "test_stop_tokens_end_a_completion"
SPANNING = "test_stop_strings_may_span_tokens"
STOP_STRING = "test_stop_strings_end_a_completion"
TEXT = "test_text_and_stop_strings_are_of_the_completion_alone"
LENGTHS = "test_lengths_are_exact"
MAX_TOKENS = "test_max_tokens_bounds_a_completion"
ERRORS = "test_errors_name_the_request"
HALF_WAY = "test_abort_keeps_the_tokens_so_far"
NAMED = "test_abort_ends_exactly_the_requests_named"
ALL = "test_abort_of_all_ends_all"
RESUMED = "test_a_completion_resumes_after_any_token"
RESUMED_STOP = "test_a_resumed_completion_stops_as_a_whole"
OTHER_BASIS = "test_resumption_with_another_basis_is_refused"
EQUAL_IDS = "test_equal_ids_get_their_own_completions"
CANCELLED = "test_a_cancelled_request_leaves_the_others_alone"
KEPT_VERSIONS = "test_a_resumed_completion_keeps_its_versions"
SAME_DRAWS = "test_versions_do_not_change_the_draws"
CROSSING = "test_a_sync_while_sampling_is_stated_token_by_token"
FAILED_SYNC = "test_requests_held_over_a_failed_sync_fail"
BEGUN = "test_a_sync_has_a_beginning"
OFFLOADED_SYNC = "test_offloading_keeps_the_synced_weights"
VIEWS = "test_tensors_may_be_views"
COPIED = "test_tensors_that_were_given_are_not_kept"
NEW_WEIGHTS = "test_new_weights_change_the_output"
ANNOUNCED = "test_weights_that_were_not_announced_are_refused"
MANIFEST = "test_a_manifest_that_does_not_fit_is_refused"
LOADING = "test_a_loading_replica_serves_nothing"
PAUSED = "test_a_paused_request_goes_on_later"
WAITS = "test_what_comes_while_paused_waits"
REPEATED = "test_pause_and_resume_may_repeat"
TIMEOUT = "test_a_timeout_names_the_request"
OFFLOADED = "test_an_offloaded_generator_refuses_work"
CLOSED = "test_closing_ends_open_requests"
EARLY = "test_closing_before_setup_is_allowed"
LEFT = "test_closing_leaves_nothing"
SCORED = "test_tokens_are_scored_or_refused"
CLASSIFIED = "test_a_model_that_samples_refuses_to_classify"
LOOP = "test_the_event_loop_stays_free"
ALONE = "test_sampling_leaves_the_process_as_it_was"
DECLARED = "test_what_is_declared_is_there"
ARGUMENTS = "test_unknown_engine_arguments_are_refused"
STREAMED = "test_streaming_tells_a_prefix"

NUMBER = "np.random.Generator(np.random.Philox(key=[sampling.seed % 2**64, position])).random()"
ARGMAX = "token = int(raw.argmax())"
SCALED = "scaled = logits.double() / basis.temperature"
TOP_K = "scaled[scaled < scaled.topk(basis.top_k).values[-1]] = -torch.inf"
TOP_P = "probabilities.cumsum(-1) - probabilities >= basis.top_p"
PROCESSED = "processed = processed_logprobs(logits, sampling.basis)"
CUMULATIVE = "cumulative = processed.exp().cumsum(-1)"
DRAWN = "drawn = draw(logits, sampling, len(rollout.draws))"
STOP_TOKENS = "drawn.token in sampling.stop_token_ids"
END = "(drawn.token == END_OF_SEQUENCE and not sampling.ignore_eos)"
STOPS = "any(stop in decode(rollout.tokens) for stop in sampling.stop)"
ABORTED = 'return rollout.completion("abort")'
NAMED_HERE = "request_ids is None or rollout.request.id in request_ids"
PRIOR_DRAWS = "rollout.draws = [Draw(int(token), float(logprob), float(of_raw)) for token, logprob, of_raw in drawn]"
PRIOR_VERSIONS = (
    "rollout.versions = [span.version for span in prior.version_spans for _ in range(span.start, span.stop)]"
)
TEXT_FIELD = "text=decode(self.tokens)"
SPANS = "version_spans=tuple(VersionSpan(start, stop, self.versions[start]) for start, stop in spans)"
LIMIT = "while len(rollout.draws) < sampling.max_tokens:"
CLOSE = 'self.die("the generator was closed")'
COPY = "live.copy_(tensor)"
BEGIN = 'if self._replica.state == "dead" or self._version is not None:'
WAITING = 'if self._paused or self._state == "loading":'
TO_DEVICE = "self._weights = {name: tensor.to(self.context.device) for name, tensor in self._weights.items()}"
RESUME = "self._paused = False\n\n    # For"
FAILED = 'raise BackendError(f"{self.name}: request {request.id!r} failed: {self._problem}; restart the replica")'


def _edit(name: str, caught_by: str, old: str, new: str, file: str = "generator.py") -> SourceMutant:
    return SourceMutant("generator", name, file, old, new, caught_by)


def _draw(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return _edit(name, caught_by, old, new, "sampling.py")


def _load(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return _edit(name, caught_by, old, new, "weight_loader.py")


def _record(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return _edit(name, caught_by, old, new, "plugin.py")


def _end(name: str, code: str) -> SourceMutant:
    return _edit(name, LEFT, CLOSE, f"{CLOSE}; {code}")


MUTANTS = (
    # Draws
    _draw(
        "second_at_near_ties",
        TIES,
        ARGMAX,
        "two = raw.topk(2); token = int(two.indices[int(two.values[0] - two.values[1] < 0.1)])",
    ),
    _draw(
        "low_temperatures_are_greedy",
        TIES,
        CUMULATIVE,
        f"{CUMULATIVE} if sampling.temperature >= 0.1 else (processed == processed.max()).double().cumsum(-1)",
    ),
    _draw("greedy_takes_the_last_token_of_all", GREEDY, ARGMAX, "token = len(raw) - 1"),
    _draw(
        "greedy_logprob_of_the_processed",
        GREEDY,
        "return Draw(token, float(raw[token]), float(raw[token]))",
        "return Draw(token, 0.0, float(raw[token]))",
    ),
    _draw(
        "temperature_twice_when_drawing",
        MIXED,
        CUMULATIVE,
        "cumulative = torch.softmax(processed / sampling.temperature, -1).cumsum(-1)",
    ),
    _draw("draws_without_temperature", MIXED, CUMULATIVE, "cumulative = (raw.exp() * processed.isfinite()).cumsum(-1)"),
    _draw(
        "draws_without_the_last_kept",
        MIXED,
        CUMULATIVE,
        "cumulative = torch.where(processed == processed[processed.isfinite()].min(), 0.0, processed.exp()).cumsum(-1)",
    ),
    _draw("draws_uniformly_of_the_kept", MIXED, CUMULATIVE, "cumulative = processed.isfinite().double().cumsum(-1)"),
    _draw("draws_from_the_raw_distribution", MIXED, CUMULATIVE, "cumulative = raw.exp().cumsum(-1)"),
    _draw("top_k_one_less", MIXED, "scaled.topk(basis.top_k)", "scaled.topk(max(1, basis.top_k - 1))"),
    _draw("top_k_one_more", BASIS, "scaled.topk(basis.top_k)", "scaled.topk(basis.top_k + 1)"),
    _draw("top_k_is_ignored", BASIS, "if 0 < basis.top_k < len(scaled):", "if False:"),
    _draw(
        "top_p_without_the_crossing_token",
        MIXED,
        TOP_P,
        "(probabilities.cumsum(-1) >= basis.top_p) & (probabilities < probabilities[0])",
    ),
    _draw(
        "top_p_with_one_more",
        BASIS,
        TOP_P,
        "probabilities.cumsum(-1) - probabilities - probabilities[0] / 2 >= basis.top_p",
    ),
    _draw("top_p_is_ignored", BASIS, "if basis.top_p < 1.0:", "if basis.top_p < 0.0:"),
    _draw(
        "top_p_before_temperature",
        BASIS,
        "torch.softmax(scaled, -1).sort",
        "torch.softmax(scaled * basis.temperature, -1).sort",
    ),
    _draw(
        "cut_without_renormalising",
        BASIS,
        "return torch.log_softmax(scaled, -1)",
        "return torch.where(scaled.isfinite(), torch.log_softmax(logits.double() / basis.temperature, -1), -torch.inf)",
    ),
    _draw(
        "raw_logprobs_are_processed",
        BASIS,
        "float(processed[token]), float(raw[token]))",
        "float(processed[token]), float(processed[token]))",
    ),
    _draw(
        "processed_logprobs_are_raw",
        BASIS,
        "float(processed[token]), float(raw[token]))",
        "float(raw[token]), float(raw[token]))",
    ),
    _draw("one_number_for_all_positions", SUCCESSIVE, NUMBER, NUMBER.replace("position]", "0]")),
    _draw("one_number_for_two_positions", SUCCESSIVE, NUMBER, NUMBER.replace("position]", "position // 2]")),
    _draw("seeds_of_16_bits", SEED, NUMBER, NUMBER.replace("2**64", "2**16")),
    _draw("seeds_of_31_bits", SEED, NUMBER, NUMBER.replace("2**64", "2**31")),
    _draw("every_other_seed", SEED, NUMBER, NUMBER.replace("sampling.seed %", "sampling.seed // 2 %")),
    _draw("numbers_depend_on_max_tokens", SEED, NUMBER, NUMBER.replace("position]", "position + sampling.max_tokens]")),
    _draw("numbers_of_the_process", BATCHED, NUMBER, "random.random()"),
    _edit(
        "first_settings_for_all",
        MIXED,
        DRAWN,
        "drawn = draw(logits, replace(self._rollouts[0].request.sampling, seed=sampling.seed), len(rollout.draws))",
    ),
    _edit(
        "settings_of_the_previous_request",
        MIXED,
        DRAWN,
        "drawn = draw(logits, replace(sampling, temperature=getattr(self, 't', sampling.temperature)), "
        "len(rollout.draws)); self.t = sampling.temperature",
    ),
    _edit(
        "seed_of_the_group",
        GROUP,
        DRAWN,
        "drawn = draw(logits, replace(sampling, seed=len(request.group_id) or sampling.seed), len(rollout.draws))",
    ),
    _edit(
        "seed_of_prompt_and_group",
        GROUP,
        DRAWN,
        "drawn = draw(logits, replace(sampling, seed=sum(request.prompt_ids) if request.group_id else "
        "sampling.seed), len(rollout.draws))",
    ),
    _edit(
        "seed_and_id",
        SEED,
        DRAWN,
        "drawn = draw(logits, replace(sampling, seed=sampling.seed + len(request.id)), len(rollout.draws))",
    ),
    _edit(
        "seed_and_group",
        SEED,
        DRAWN,
        "drawn = draw(logits, replace(sampling, seed=sampling.seed + len(request.group_id)), len(rollout.draws))",
    ),
    _edit(
        "seed_and_version",
        SAME_DRAWS,
        DRAWN,
        "drawn = draw(logits, replace(sampling, seed=sampling.seed + self._policy_version), len(rollout.draws))",
    ),
    _edit(
        "seed_and_batch",
        BATCHED,
        DRAWN,
        "drawn = draw(logits, replace(sampling, seed=sampling.seed + len(self._rollouts)), len(rollout.draws))",
    ),
    # What a completion is made of
    _edit("ids_of_32_bits", GREEDY, "dtype=np.int64", "dtype=np.int32"),
    _edit(
        "double_logprobs",
        GREEDY,
        "drawn.logprob for drawn in self.draws], dtype=np.float32",
        "drawn.logprob for drawn in self.draws], dtype=np.float64",
    ),
    _edit(
        "half_logprobs",
        GREEDY,
        "drawn.logprob for drawn in self.draws], dtype=np.float32",
        "drawn.logprob for drawn in self.draws], dtype=np.float16",
    ),
    _edit("states_raw", BASIS, "basis=self.request.sampling.basis", "basis=type(self.request.sampling.basis)()"),
    _edit(
        "other_sampling", GREEDY, "sampling=self.request.sampling,", "sampling=replace(self.request.sampling, seed=1),"
    ),
    _edit("request_id_of_the_group", GREEDY, "request_id=self.request.id", "request_id=self.request.group_id"),
    _edit("text_with_the_prompt", TEXT, TEXT_FIELD, "text=decode([*self.request.prompt_ids.tolist(), *self.tokens])"),
    _edit("text_without_the_last_token", TEXT, TEXT_FIELD, "text=decode(self.tokens[:-1])"),
    _edit("no_text", SPANNING, TEXT_FIELD, "text=''"),
    _edit("upper_text", TEXT, TEXT_FIELD, "text=decode(self.tokens).upper()"),
    _edit(
        "spans_of_single_tokens_overlap",
        GREEDY,
        SPANS,
        SPANS.replace("VersionSpan(start, stop,", "VersionSpan(start, stop + 1,"),
    ),
    # Where it ends
    _edit("end_of_sequence_never_ends", ENDS, END, "False"),
    _edit("ignore_eos_is_ignored", ENDS, END, "drawn.token == END_OF_SEQUENCE"),
    _edit(
        "end_of_sequence_is_dropped",
        ENDS,
        "drawn.token == END_OF_SEQUENCE and not sampling.ignore_eos",
        "drawn.token == END_OF_SEQUENCE and not sampling.ignore_eos and rollout.draws.pop()",
    ),
    _edit(
        "end_of_sequence_at_the_start_only",
        ENDS,
        END,
        "(drawn.token == END_OF_SEQUENCE and not sampling.ignore_eos and len(rollout.draws) == 1)",
    ),
    _edit(
        "length_before_end",
        ENDS,
        f"if {STOP_TOKENS} or {END}:",
        f"if ({STOP_TOKENS} or {END}) and len(rollout.draws) < sampling.max_tokens:",
    ),
    _edit(
        "end_reported_as_length",
        ENDS,
        f'{END}:\n                return rollout.completion("stop")',
        f'{END}:\n                return rollout.completion("length" if drawn.token == 0 else "stop")',
    ),
    _edit("stop_tokens_with_ignore_eos_only", ENDS, STOP_TOKENS, f"{STOP_TOKENS} and sampling.ignore_eos"),
    _edit("first_stop_token_only", ENDS, STOP_TOKENS, "drawn.token in sampling.stop_token_ids[:1]"),
    _edit("stop_tokens_are_ignored", STOP_TOKEN, STOP_TOKENS, "False"),
    _edit(
        "stop_string_in_the_last_token",
        SPANNING,
        STOPS,
        "any(stop in decode(rollout.tokens[-1:]) for stop in sampling.stop)",
    ),
    _edit(
        "stop_string_is_a_token", SPANNING, STOPS, "any(stop == decode(rollout.tokens[-1:]) for stop in sampling.stop)"
    ),
    _edit("first_stop_string_only", SPANNING, STOPS, "sampling.stop[0] in decode(rollout.tokens)"),
    _edit("last_stop_string_only", SPANNING, STOPS, "sampling.stop[-1] in decode(rollout.tokens)"),
    _edit("all_stop_strings", SPANNING, STOPS, STOPS.replace("any", "all")),
    _edit(
        "stop_string_a_token_late",
        SPANNING,
        STOPS,
        "any(stop in decode(rollout.tokens[:-1]) for stop in sampling.stop)",
    ),
    _edit("stop_string_cut_from_the_tokens", SPANNING, f"{STOPS}:\n", f"{STOPS} and rollout.draws.pop():\n"),
    _edit("stop_strings_are_ignored", STOP_STRING, STOPS, "False"),
    _edit(
        "stop_string_in_the_prompt",
        TEXT,
        STOPS,
        "any(stop in decode([*request.prompt_ids.tolist(), *rollout.tokens]) for stop in sampling.stop)",
    ),
    _edit(
        "stop_string_across_the_prompt_end",
        TEXT,
        STOPS,
        "any(stop in decode([*request.prompt_ids.tolist()[-1:], *rollout.tokens]) for stop in sampling.stop)",
    ),
    _edit(
        "stop_string_of_any_case",
        TEXT,
        STOPS,
        "any(stop.lower() in decode(rollout.tokens).lower() for stop in sampling.stop)",
    ),
    _edit(
        "any_letter_of_a_stop_string",
        TEXT,
        STOPS,
        "any(set(stop) & set(decode(rollout.tokens)) for stop in sampling.stop)",
    ),
    _edit("one_token_too_long_is_served", LENGTHS, "> longest:", "> longest + 1:"),
    _edit("exact_length_is_refused", LENGTHS, "> longest:", ">= longest:"),
    _edit(
        "model_length_is_ignored",
        LENGTHS,
        "longest = self._source.max_length or self.options.max_length",
        "longest = self.options.max_length",
    ),
    _edit(
        "only_the_prompt_is_bounded",
        LENGTHS,
        "if num_prompt + request.sampling.max_tokens > longest:",
        "if num_prompt > longest:",
    ),
    _edit(
        "cut_to_the_length",
        LENGTHS,
        LIMIT,
        f"{LIMIT}\n            if len(request.prompt_ids) + len(rollout.draws) >= (self._source.max_length or "
        "0) - 1:\n                break",
    ),
    _edit("one_token_more", MAX_TOKENS, LIMIT, LIMIT.replace("<", "<=")),
    _edit("one_token_less", MAX_TOKENS, LIMIT, LIMIT.replace("sampling.max_tokens", "max(1, sampling.max_tokens - 1)")),
    _edit(
        "length_reported_as_stop",
        MAX_TOKENS,
        'return rollout.completion("length")',
        'return rollout.completion("stop")',
    ),
    _edit("negative_ids_are_taken", ERRORS, " or int(request.prompt_ids.min()) < 0", ""),
    _edit(
        "unknown_ids_wrap",
        ERRORS,
        " or int(request.prompt_ids.max()) >= vocab_size",
        " or request.prompt_ids.__imod__(vocab_size) is None",
    ),
    _edit("errors_without_the_id", ERRORS, 'where = f"{self.name}, request {request.id!r}"', "where = self.name"),
    _edit("given_tokens_are_sampled", SCORED, "if request.forced_ids is not None:", "if False:"),
    _edit("what_is_to_be_classified_is_sampled", CLASSIFIED, "if request.classify:", "if False:"),
    # Aborted and resumed
    _edit("abort_loses_the_tokens", HALF_WAY, ABORTED, f"rollout.draws, rollout.versions = [], []; {ABORTED}"),
    _edit(
        "abort_doubles_the_tokens",
        HALF_WAY,
        ABORTED,
        f"rollout.draws, rollout.versions = rollout.draws * 2, rollout.versions * 2; {ABORTED}",
    ),
    _edit(
        "abort_doubles_the_last_token",
        HALF_WAY,
        ABORTED,
        f"rollout.draws += rollout.draws[-1:]; rollout.versions += rollout.versions[-1:]; {ABORTED}",
    ),
    _edit(
        "abort_zeroes_the_logprobs",
        HALF_WAY,
        ABORTED,
        f"rollout.draws = [Draw(d.token, 0.0, 0.0) for d in rollout.draws]; {ABORTED}",
    ),
    _edit("abort_reported_as_stop", HALF_WAY, ABORTED, 'return rollout.completion("stop")'),
    _edit("abort_raises", HALF_WAY, ABORTED, 'raise BackendError(f"{self.name}: request {request.id!r} was aborted")'),
    _edit(
        "abort_of_ids_that_contain_it",
        NAMED,
        NAMED_HERE,
        "request_ids is None or any(i in rollout.request.id for i in request_ids)",
    ),
    _edit("abort_does_nothing", NAMED, "rollout.aborted = True", "rollout.aborted = False"),
    _edit(
        "abort_of_ids_within_it",
        NAMED,
        NAMED_HERE,
        "request_ids is None or any(rollout.request.id in i for i in request_ids)",
    ),
    _edit(
        "abort_of_ids_that_begin_so",
        NAMED,
        NAMED_HERE,
        "request_ids is None or rollout.request.id.startswith(tuple(request_ids))",
    ),
    _edit("abort_of_a_group", NAMED, NAMED_HERE, f"{NAMED_HERE} or rollout.request.group_id in request_ids"),
    _edit(
        "abort_of_any_case",
        NAMED,
        NAMED_HERE,
        "request_ids is None or rollout.request.id.lower() in [i.lower() for i in request_ids]",
    ),
    _edit("abort_of_all", NAMED, NAMED_HERE, "True"),
    _edit(
        "abort_of_ids_for_ever",
        NAMED,
        "for rollout in self._rollouts:\n",
        "self._check = lambda r, c=self._check: c(replace(r, prompt_ids=r.prompt_ids[:0] if r.id in "
        "(request_ids or ()) else r.prompt_ids))\n        for rollout in self._rollouts:\n",
    ),
    _edit("abort_of_none", ALL, "request_ids is None or ", "request_ids is not None and "),
    _edit(
        "abort_of_all_but_the_first",
        ALL,
        "for rollout in self._rollouts:",
        "for rollout in self._rollouts[request_ids is None:]:",
    ),
    _edit("abort_waits_for_the_resume", ALL, "if rollout.aborted:", "if rollout.aborted and not self._paused:"),
    _edit(
        "resume_begins_again",
        KEPT_VERSIONS,
        "if (prior := request.resume_from) is not None:",
        "if (prior := None) is not None:",
    ),
    _edit(
        "resume_bounds_the_new_tokens",
        RESUMED,
        LIMIT,
        "while len(rollout.draws) - (0 if request.resume_from is None else "
        "len(request.resume_from.token_ids)) < sampling.max_tokens:",
    ),
    _edit(
        "resume_restarts_the_numbers",
        RESUMED,
        DRAWN,
        "drawn = draw(logits, sampling, len(rollout.draws) - (0 if request.resume_from is None else "
        "len(request.resume_from.token_ids)))",
    ),
    _edit(
        "resume_goes_on_from_the_prompt",
        RESUMED,
        "last = rollout.draws[-1].token if rollout.draws",
        "last = rollout.draws[-1].token if rollout.draws and len(rollout.draws) != "
        "len(getattr(request.resume_from, 'token_ids', ()))",
    ),
    _edit(
        "resume_loses_a_token",
        RESUMED,
        PRIOR_VERSIONS,
        f"{PRIOR_VERSIONS}; rollout.draws = rollout.draws[:-1]; rollout.versions = rollout.versions[:-1]; "
        "rollout.draws += rollout.draws[-1:]; rollout.versions += rollout.versions[-1:]",
    ),
    _edit(
        "resume_zeroes_the_logprobs",
        RESUMED,
        "Draw(int(token), float(logprob), float(of_raw))",
        "Draw(int(token), 0.0, float(of_raw))",
    ),
    _edit(
        "resume_has_processed_for_raw",
        RESUMED,
        "Draw(int(token), float(logprob), float(of_raw))",
        "Draw(int(token), float(logprob), float(logprob))",
    ),
    _edit(
        "resume_has_raw_for_processed",
        RESUMED,
        "Draw(int(token), float(logprob), float(of_raw))",
        "Draw(int(token), float(of_raw), float(of_raw))",
    ),
    _edit(
        "resume_rounds_the_logprobs",
        RESUMED,
        "Draw(int(token), float(logprob), float(of_raw))",
        "Draw(int(token), round(float(logprob), 5), float(of_raw))",
    ),
    _edit(
        "resume_has_text_of_the_rest",
        RESUMED,
        TEXT_FIELD,
        "text=decode(self.tokens[0 if self.request.resume_from is None else len(self.request.resume_from.token_ids):])",
    ),
    _edit(
        "resume_reports_abort",
        RESUMED,
        'return rollout.completion("length")',
        'return rollout.completion("length" if request.resume_from is None else "abort")',
    ),
    _edit(
        "resume_of_the_whole_fails",
        RESUMED,
        PRIOR_VERSIONS,
        f"{PRIOR_VERSIONS}\n            if len(rollout.draws) == request.sampling.max_tokens:\n               "
        f" raise BackendError(f'{{self.name}}: nothing to resume')",
    ),
    _edit(
        "resume_stops_anew",
        RESUMED_STOP,
        STOPS,
        "any(stop in decode(rollout.tokens[0 if request.resume_from is None else "
        "len(request.resume_from.token_ids):]) for stop in sampling.stop)",
    ),
    _edit("resume_with_any_basis", OTHER_BASIS, "request.resume_from.basis != request.sampling.basis", "False"),
    _edit(
        "resume_with_any_top_p",
        OTHER_BASIS,
        "request.resume_from.basis != request.sampling.basis",
        "request.resume_from.basis.temperature != request.sampling.basis.temperature",
    ),
    _edit(
        "equal_ids_share_a_completion",
        EQUAL_IDS,
        "rollout = self._start(request)",
        "rollout = next((r for r in self._rollouts if r.request.id == request.id), None) or self._start(request)",
    ),
    _edit(
        "equal_ids_are_refused",
        EQUAL_IDS,
        "rollout = self._start(request)",
        "rollout = self._start(request)\n        if any(r.request.id == request.id for r in "
        "self._rollouts):\n            raise BackendError(f'{self.name}: request {request.id!r} is open')",
    ),
    _edit(
        "cancellation_is_an_abort",
        CANCELLED,
        "except TimeoutError as error:",
        "except asyncio.CancelledError:\n            return rollout.completion('abort')\n        except "
        "TimeoutError as error:",
    ),
    _edit(
        "cancellation_ends_all",
        CANCELLED,
        "except TimeoutError as error:",
        "except asyncio.CancelledError:\n            await self.abort()\n            raise\n        except "
        "TimeoutError as error:",
    ),
    # Versions
    _edit(
        "resume_has_the_present_version",
        KEPT_VERSIONS,
        PRIOR_VERSIONS,
        "rollout.versions = [self._policy_version] * len(rollout.draws)",
    ),
    _edit(
        "one_version_at_the_end",
        CROSSING,
        "rollout.versions.append(self._policy_version)",
        "rollout.versions = [self._policy_version] * len(rollout.draws)",
    ),
    _edit(
        "one_version_at_the_start",
        CROSSING,
        "rollout.versions.append(self._policy_version)",
        "rollout.versions.append(rollout.versions[0] if rollout.versions else self._policy_version)",
    ),
    _edit(
        "resumed_rest_has_the_old_version",
        KEPT_VERSIONS,
        "rollout.versions.append(self._policy_version)",
        "rollout.versions.append(rollout.versions[-1] if request.resume_from is not None and "
        "rollout.versions else self._policy_version)",
    ),
    _edit("samples_while_loading", CROSSING, WAITING, "if self._paused:"),
    _edit(
        "version_before_the_load",
        CROSSING,
        'self._state, self._problem = "loading", "weights are being loaded"',
        'self._state, self._problem = "loading", "weights are being loaded"; self._policy_version += 1',
    ),
    _edit(
        "version_stays",
        NEW_WEIGHTS,
        "self._policy_version, self._state, self._problem = policy_version, ",
        "self._state, self._problem = ",
    ),
    _edit(
        "version_counts_syncs",
        NEW_WEIGHTS,
        "self._policy_version, self._state, self._problem = policy_version, ",
        "self._policy_version, self._state, self._problem = self._policy_version + 2, ",
    ),
    _edit("a_failed_sync_without_the_id", FAILED_SYNC, FAILED, 'raise BackendError(f"{self.name} failed")'),
    _edit("a_failed_sync_lets_requests_wait", FAILED_SYNC, FAILED, "continue"),
    _edit(
        "a_failed_sync_raises_runtime_error",
        FAILED_SYNC,
        FAILED,
        'raise RuntimeError(f"request {request.id!r} failed")',
    ),
    _edit("a_failed_sync_aborts", FAILED_SYNC, FAILED, ABORTED),
    _load("begin_revives", FAILED_SYNC, BEGIN, "if self._version is not None:"),
    _load("begin_while_open", BEGUN, BEGIN, 'if self._replica.state == "dead":'),
    _load(
        "load_without_begin",
        BEGUN,
        'if self._version is None:\n            raise WeightSyncError(f"{self._replica.name}: tensors',
        'if False:\n            raise WeightSyncError(f"{self._replica.name}: tensors',
    ),
    _load(
        "finish_without_begin",
        BEGUN,
        'if self._version is None:\n            raise WeightSyncError(f"{self._replica.name}: finish',
        "if self._version is None:\n            return self._replica.state == 'dead'\n            raise "
        'WeightSyncError(f"{self._replica.name}: finish',
    ),
    _load("begin_while_offloaded", OFFLOADED_SYNC, "if self._replica.weights_are_offloaded:", "if False:"),
    _load("keeps_the_tensors", COPIED, COPY, "self._replica.weights[name] = tensor"),
    _load(
        "keeps_small_tensors",
        COPIED,
        COPY,
        "live.copy_(tensor) if tensor.dim() > 1 else self._replica.weights.__setitem__(name, tensor)",
    ),
    _load(
        "copies_at_the_end",
        COPIED,
        COPY,
        "self._later = [*getattr(self, '_later', ()), (live, tensor)]; [a.copy_(b) for a, b in self._later]",
    ),
    _load("reads_the_storage", VIEWS, COPY, "live.copy_(torch.as_strided(tensor, live.shape, live.stride()))"),
    _load(
        "transposes_square_views",
        VIEWS,
        COPY,
        "live.copy_(tensor if tensor.is_contiguous() else tensor.t() if tensor.dim() == 2 else tensor)",
    ),
    _load("half_precision_on_the_way", NEW_WEIGHTS, COPY, "live.copy_(tensor.bfloat16())"),
    _load("adds_the_tensors", NEW_WEIGHTS, COPY, "live.add_(tensor)"),
    _load("skips_small_tensors", NEW_WEIGHTS, COPY, "live.copy_(tensor if tensor.dim() > 1 else live)"),
    _load("first_call_only", NEW_WEIGHTS, COPY, "live.copy_(live if self._arrived else tensor)"),
    _load("any_dtype", ANNOUNCED, " or live.dtype != tensor.dtype", ""),
    _load("twice", ANNOUNCED, "elif name in self._arrived:", "elif False:"),
    _load(
        "missing_tensors",
        ANNOUNCED,
        "if missing := sorted(self._expected.tensors.keys() - self._arrived):",
        "if missing := []:",
    ),
    _load(
        "unknown_tensors",
        ANNOUNCED,
        "if live is None:",
        "if live is None and name.endswith('weight'):\n                continue\n            if live is None:",
    ),
    _load("a_wrong_tensor_leaves_it_loading", ANNOUNCED, "await self.fail(problem)", "self._version = None"),
    _load("any_manifest", MANIFEST, "if differences := self._expected.differences(manifest):", "if differences := ():"),
    _load(
        "a_wrong_manifest_kills",
        MANIFEST,
        "raise WeightSyncError(f\"{where}: {'; '.join(differences)}\")",
        "await self.fail(where)\n            raise WeightSyncError(f\"{where}: {'; '.join(differences)}\")",
    ),
    _load("serves_while_loading", LOADING, "self._replica.stop_serving()", "pass"),
    _load("fail_without_the_reason", LOADING, "self._replica.die(reason)", "self._replica.die('failed')"),
    # Pauses, memory, the end
    _edit("samples_while_paused", PAUSED, WAITING, 'if self._state == "loading":'),
    _edit(
        "refuses_while_paused",
        WAITS,
        "self._check(request)",
        "self._check(request)\n        if self._paused:\n            raise BackendError(f'{self.name} is "
        "paused: {request.id!r}')",
    ),
    _edit(
        "resume_forgets_what_waited",
        WAITS,
        RESUME,
        "self._paused = False\n        for rollout in self._rollouts:\n            rollout.aborted = True\n\n    # For",
    ),
    _edit("second_pause_resumes", REPEATED, "self._paused = True", "self._paused = not self._paused"),
    _edit("second_resume_pauses", REPEATED, RESUME, "self._paused = not self._paused\n\n    # For"),
    _edit(
        "pause_waits_for_the_end",
        WAITS,
        "self._paused = True",
        "self._paused = True\n        while self._rollouts or self._paused:\n            await asyncio.sleep(0)",
    ),
    _edit("timeout_without_the_id", TIMEOUT, "request {request.id!r} had no answer", "a request had no answer"),
    _edit("timeout_is_ignored", TIMEOUT, "asyncio.timeout(request.timeout_s)", "asyncio.timeout(None)"),
    _edit(
        "timeout_returns",
        TIMEOUT,
        "except TimeoutError as error:",
        "except TimeoutError as error:\n            return rollout.completion('abort')",
    ),
    _edit(
        "timeout_kills",
        TIMEOUT,
        "except TimeoutError as error:",
        "except TimeoutError as error:\n            self.die('timeout')",
    ),
    _edit("serves_while_offloaded", OFFLOADED, "if self._offloaded and not self._paused:", "if False:"),
    _edit(
        "serves_without_kv_cache",
        OFFLOADED,
        "if self._offloaded and not self._paused:",
        "if self.weights_are_offloaded and not self._paused:",
    ),
    _edit(
        "serves_without_weights",
        OFFLOADED,
        "if self._offloaded and not self._paused:",
        "if 'kv_cache' in self._offloaded and not self._paused:",
    ),
    _edit("one_part_brings_back_all", OFFLOADED, "self._offloaded -= set(parts)", "self._offloaded = set()"),
    _edit(
        "onload_twice_fails",
        OFFLOADED,
        "self._offloaded -= set(parts)",
        "[self._offloaded.remove(part) for part in parts]",
    ),
    _edit(
        "offload_twice_fails",
        OFFLOADED,
        'self._offloaded |= set(parts) & {"weights", "kv_cache"}',
        "assert not self._offloaded & set(parts); self._offloaded |= set(parts)",
    ),
    _edit("onload_brings_back_nothing", OFFLOADED, "self._offloaded -= set(parts)", "self._offloaded |= set(parts)"),
    _edit(
        "onload_reads_the_model_directory",
        OFFLOADED_SYNC,
        f'        self._offloaded -= set(parts)\n        if "weights" in parts:\n            {TO_DEVICE}',
        '        self._offloaded -= set(parts)\n        if "weights" in parts:\n            self._weights = '
        "read_weights(Path(self._source.path))",
    ),
    _edit("close_hides", CLOSED, CLOSE, f"{CLOSE}; self._problem = None"),
    _edit("closed_without_an_end", CLOSED, CLOSE, "pass"),
    _edit("close_twice_fails", CLOSED, CLOSE, f"{CLOSE}; self._weights.pop(UNIGRAM)"),
    _edit("close_before_setup_fails", EARLY, CLOSE, f"{CLOSE}; self._weights[UNIGRAM]"),
    _edit(
        "serves_before_setup", EARLY, 'self._state: ReplicaState = "loading"', 'self._state: ReplicaState = "serving"'
    ),
    _end("close_leaves_a_file", "Path(tempfile.mkstemp()[1]).write_text('left')"),
    _end("close_leaves_a_process", "subprocess.Popen(['sleep', '20'])"),
    _end("close_leaves_a_thread", "threading.Thread(target=time.sleep, args=(20,), daemon=True).start()"),
    _end("close_leaves_a_folder", "tempfile.mkdtemp()"),
    _end("close_leaves_shared_memory", "Path(f'/dev/shm/acme-{time.time()}').write_text('left')"),
    _edit(
        "closed_without_the_id",
        LEFT,
        'raise BackendError(f"{where}: the replica is {self._state}: {self._problem}")',
        'raise BackendError(f"the replica is {self._state}")',
    ),
    # The process, the loop, the promises
    _edit("sampling_seeds", ALONE, DRAWN, f"torch.manual_seed(0); random.seed(0); print(len(rollout.draws)); {DRAWN}"),
    _edit("sampling_seeds_torch", ALONE, DRAWN, f"torch.manual_seed(0); {DRAWN}"),
    _edit("sampling_draws_from_torch", ALONE, DRAWN, f"torch.rand(()); {DRAWN}"),
    _edit("sampling_seeds_numpy", ALONE, DRAWN, f"np.random.seed(0); {DRAWN}"),
    _edit("sampling_prints", ALONE, DRAWN, f"print(len(rollout.draws)); {DRAWN}"),
    _load("loading_seeds", ALONE, COPY, f"{COPY}; torch.manual_seed(0)"),
    _edit("blocks_per_token", LOOP, DRAWN, f"time.sleep(0.004); {DRAWN}"),
    _edit(
        "works_per_token",
        LOOP,
        DRAWN,
        f"until = time.thread_time() + 0.004\n            while time.thread_time() <"
        f" until:\n                pass\n            {DRAWN}",
    ),
    _edit(
        "port_left",
        ALONE,
        "        self._check(request)\n        rollout",
        "        self._check(request)\n        KEPT.append(KEPT[0] if KEPT else"
        " socket.create_server(('127.0.0.1', 0)))\n        rollout",
    ),
    _edit("sets_the_level", GREEDY, CLOSE, f"{CLOSE}; logging.disable(logging.CRITICAL)"),
    _edit("patches_random", ALONE, DRAWN, f"random.random = lambda: 0.5; {DRAWN}"),
    _edit("search_path", ALONE, DRAWN, f"sys.path.append(request.id); {DRAWN}"),
    _edit("umask", ALONE, DRAWN, f"os.umask(0o027); {DRAWN}"),
    _draw(
        "temperatures_below_0_06_are_greedy",
        TIES,
        CUMULATIVE,
        f"{CUMULATIVE} if sampling.temperature >= 0.06 else (processed == processed.max()).double().cumsum(-1)",
    ),
    _edit(
        "streams_from_a_thread",
        "test_streaming_is_on_the_event_loop",
        "                on_tokens(len(rollout.draws) - 1, [drawn.token])",
        "                await asyncio.to_thread(on_tokens, len(rollout.draws) - 1, [drawn.token])",
    ),
    _edit(
        "tells_the_prior_again",
        "test_streaming_of_a_resumed_completion_begins_after_the_prior",
        "        rollout = self._start(request)\n",
        "        rollout = self._start(request)\n        if on_tokens is not None and rollout.draws:\n"
        "            on_tokens(0, rollout.tokens)\n",
    ),
    _edit(
        "tells_from_zero_when_resumed",
        "test_streaming_of_a_resumed_completion_begins_after_the_prior",
        "on_tokens(len(rollout.draws) - 1, [drawn.token])",
        "on_tokens(len(rollout.draws) - 1 - len(getattr(request.resume_from, 'token_ids', ())), [drawn.token])",
    ),
    _edit(
        "tells_a_token_late",
        STREAMED,
        "on_tokens(len(rollout.draws) - 1, [drawn.token])",
        "on_tokens(len(rollout.draws), [drawn.token])",
    ),
    _edit(
        "tells_all_each_time",
        STREAMED,
        "on_tokens(len(rollout.draws) - 1, [drawn.token])",
        "on_tokens(0, rollout.tokens)",
    ),
    _edit(
        "tells_nothing_of_the_last",
        STREAMED,
        "            if on_tokens is not None:",
        "            if on_tokens is not None and len(rollout.draws) < sampling.max_tokens:",
    ),
    _edit(
        "goes_on_after_a_timeout",
        "test_a_timeout_ends_the_work",
        "                return await self._sample(rollout, on_tokens)",
        "                return await asyncio.shield(self._sample(rollout, on_tokens))",
    ),
    _load(
        "replaces_nan",
        "test_damaged_weights_are_loaded_as_they_are",
        COPY,
        "live.copy_(__import__('torch').nan_to_num(tensor))",
    ),
    _edit("engine_arguments_ignored", ARGUMENTS, "if context.engine_arguments:", "if False:"),
    _edit("engine_arguments_unnamed", ARGUMENTS, "{', '.join(sorted(context.engine_arguments))}", "all of them"),
    _record(
        "declares_a_kept_cache",
        "test_an_unfinished_request_lives_through_a_sync_as_declared",
        'kv_after_sync="recomputed"',
        'kv_after_sync="kept"',
    ),
    _record(
        "declares_dropped_requests",
        "test_an_unfinished_request_lives_through_a_sync_as_declared",
        'kv_after_sync="recomputed"',
        'kv_after_sync="dropped"',
    ),
    _record(
        "declares_adapters",
        "test_declared_payloads_are_taken",
        "seeded=True",
        'seeded=True, payloads=frozenset({"full", "adapter"})',
    ),
    _record("declares_an_interpreter", DECLARED, "seeded=True", "seeded=True, own_interpreter=True"),
    _record("declares_memory_handles", DECLARED, 'frozenset({"tensors"})', 'frozenset({"tensors", "memory_handles"})'),
    _record("declares_process_groups", DECLARED, 'frozenset({"tensors"})', 'frozenset({"tensors", "process_group"})'),
    _record("declares_checkpoints", NEW_WEIGHTS, 'frozenset({"tensors"})', 'frozenset({"tensors", "checkpoint"})'),
    _record("declares_boxes", NEW_WEIGHTS, 'frozenset({"tensors"})', 'frozenset({"tensors", "boxes"})'),
    _record("declares_scores", "test_given_tokens_are_scored", "seeded=True", "seeded=True, scores=True"),
    _record(
        "declares_kept_ids",
        "test_kept_ids_are_what_a_token_was_sampled_from",
        "seeded=True",
        "seeded=True, kept_ids=True",
    ),
    _record("declares_raw_only", BASIS, "seeded=True", 'seeded=True, bases=frozenset({"raw"})'),
)
