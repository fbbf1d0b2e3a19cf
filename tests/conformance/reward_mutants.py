"""The template's reward with one fault each, as an author might make it, and the contract test that must fail.

Names that mutants use and the template does not import are added by the test.
"""

from __future__ import annotations

from source_mutants import SourceMutant

JUDGED = "return [self._judge(sample) for sample in samples]"
ORDER = "test_one_result_a_sample_in_order"
ALONE = "test_a_sample_is_judged_by_itself"
WHOLE = "test_a_verdict_is_of_the_whole_sample"
ODD = "test_odd_samples_are_marked_not_raised"
STATE = "test_the_process_stays_as_it_was"
CLOSED = "test_closing_leaves_no_process"


def _edit(name: str, old: str, new: str, caught_by: str) -> SourceMutant:
    return SourceMutant("reward", name, "reward.py", old, new, caught_by)


def _cached(name: str, key: str) -> SourceMutant:
    cached = f"return [self._seen.setdefault({key}, self._judge(sample)) for sample in samples]"
    return _edit(name, JUDGED, f"self._seen = getattr(self, '_seen', {{}}); {cached}", WHOLE)


def _while_scoring(name: str, statement: str, caught_by: str = STATE) -> SourceMutant:
    return _edit(name, JUDGED, f"{statement}; {JUDGED}", caught_by)


MUTANTS = (
    _edit("reversed", JUDGED, JUDGED.replace("in samples", "in reversed(samples)"), ORDER),
    _edit("one_too_few", JUDGED, JUDGED.replace("in samples", "in samples[1:]"), ORDER),
    _edit("one_too_many", JUDGED, f"{JUDGED} + [RewardResult(0.0)]", ORDER),
    _edit(
        "unjudged_left_out", JUDGED, f"found = {JUDGED[7:]}; return [one for one in found if one.error is None]", ORDER
    ),
    _edit("unjudged_are_zero", "None,\n                error=(", "0.0,\n                answer=(", ORDER),
    _edit(
        "raises_for_unjudged",
        "return RewardResult(\n                None,\n                error=(",
        "raise ValueError(*(",
        ORDER,
    ),
    _edit("constant", "return RewardResult(coverage - penalty,", "return RewardResult(1.0,", ORDER),
    _edit("penalty_added", "coverage - penalty", "coverage + penalty", ORDER),
    _edit("penalty_ignored", "coverage - penalty", "coverage", ORDER),
    _edit("budget_off_by_one", "- self.options.length_budget)", "- self.options.length_budget - 1)", ORDER),
    _edit("characters_without_spaces", "sample.num_completion_tokens", "len(sample.text.replace(' ', ''))", ORDER),
    _edit("prompt_counts", "sample.num_completion_tokens", "len(sample.token_ids)", ORDER),
    _edit("case_matters", "text = sample.text.casefold()", "text = sample.text", ORDER),
    _edit("first_keyword_only", "for keyword in keywords)", "for keyword in keywords[:1])", ORDER),
    _edit("not_divided", " / len(keywords)", "", ORDER),
    _edit("ascii_only", "sample.text.casefold()", "sample.text.encode('ascii', 'ignore').decode().casefold()", ORDER),
    _edit("prompt_text_searched", "sample.text.casefold()", "sample.prompt.text.casefold()", ORDER),
    _edit("numpy_value", "RewardResult(coverage - penalty", "RewardResult(np.float32(coverage - penalty)", ORDER),
    _edit("bool_value", "RewardResult(coverage - penalty", "RewardResult(coverage - penalty > 0", ORDER),
    _edit("nan_component", '"length_penalty": -penalty', '"length_penalty": float("nan")', ORDER),
    _edit(
        "nan_tokens",
        '"length_penalty": -penalty}',
        '"length_penalty": -penalty}, token_values=np.full(sample.num_completion_tokens, np.nan, np.float32)',
        ORDER,
    ),
    _edit(
        "token_values_with_prompt",
        '"length_penalty": -penalty}',
        '"length_penalty": -penalty}, token_values=np.zeros(len(sample.token_ids), np.float32)',
        ORDER,
    ),
    _edit("text_must_be_there", "text = sample.text", "assert sample.text; text = sample.text", ODD),
    _edit("needs_a_turn", "text = sample.text", "sample.turns[-1]; text = sample.text", ODD),
    _edit(
        "nested_truths_raise", "if isinstance(wanted, str):", "hash(wanted)\n        if isinstance(wanted, str):", ODD
    ),
    _edit("infinite", "return RewardResult(coverage", "return RewardResult(1e308 * excess + coverage", ODD),
    _edit("none_is_no_list", JUDGED, f"{JUDGED} or None", "test_no_samples_no_results"),
    _edit("reads_the_first", JUDGED, f"samples[0]; {JUDGED}", "test_no_samples_no_results"),
    _edit(
        "rank_in_the_group",
        JUDGED,
        f"found = {JUDGED[7:]}; return [replace(one, value=one.value - 0.1 * sum(a.group_id == b.group_id for b in"
        " samples[:at])) if one.error is None else one for at, (a, one) in enumerate(zip(samples, found))]",
        ALONE,
    ),
    _edit(
        "counts_calls",
        "return RewardResult(coverage - penalty",
        "self.n = getattr(self, 'n', -1) + 1\n        return RewardResult(coverage - penalty - self.n / 1000",
        "test_the_same_sample_gets_the_same_verdict",
    ),
    _edit(
        "draws",
        "return RewardResult(coverage - penalty",
        "return RewardResult(coverage - penalty + 1e-3 * np.random.default_rng().random()",
        "test_the_same_sample_gets_the_same_verdict",
    ),
    _cached("cached_by_sample", "sample.id"),
    _cached("cached_by_prompt", "sample.prompt.id"),
    _cached("cached_by_text", "sample.text"),
    _cached("cached_by_text_and_truth", "(sample.text, str(sample.prompt.ground_truth))"),
    _cached("cached_by_truth", "str(sample.prompt.ground_truth)"),
    _while_scoring(
        "excludes_itself", "[setattr(one, 'exclusion', 'bad') for one in samples]", "test_a_sample_is_read_only"
    ),
    _while_scoring(
        "sets_the_reward", "[setattr(s, 'reward', self._judge(s)) for s in samples]", "test_a_sample_is_read_only"
    ),
    _while_scoring("changes_tokens", "[s.token_ids.fill(0) for s in samples]", "test_a_sample_is_read_only"),
    _while_scoring("prints", "print(len(samples))"),
    _while_scoring("seeds_python", "random.seed(0)"),
    _while_scoring("seeds_numpy", "np.random.seed(0)"),
    _while_scoring("draws_globally", "np.random.random()"),
    _while_scoring("seeds_torch", "torch.manual_seed(7)"),
    _while_scoring("sets_threads", "torch.set_num_threads(2)"),
    _while_scoring("sets_dtype", "torch.set_default_dtype(torch.float64)"),
    _while_scoring("changes_directory", "os.chdir('/')"),
    _while_scoring("sets_a_variable", "os.environ['ACME'] = '1'"),
    _while_scoring("leaves_a_thread", "threading.Thread(target=time.sleep, args=(8,), daemon=True).start()", CLOSED),
    _while_scoring("leaves_a_file", "Path(tempfile.gettempdir(), f'acme_{os.getpid()}').write_text('x')", CLOSED),
    _while_scoring("leaves_shared_memory", "Path('/dev/shm', f'acme_{os.getpid()}').write_text('x')", CLOSED),
    _while_scoring("leaves_a_process", "subprocess.Popen(['sleep', '5'])", CLOSED),
    _edit("never_ready", "self._ready = True", "pass", "test_is_a_reward"),
    _edit(
        "closed_once",
        "    def close(self) -> None:",
        "    def close(self) -> None:\n        assert self._ready",
        CLOSED,
    ),
    _edit(
        "shares_its_batch",
        JUDGED,
        f"self._batch = samples; await asyncio.sleep(0.01); {JUDGED.replace('in samples', 'in self._batch')}",
        "test_calls_may_overlap",
    ),
    _edit(
        "stays_busy",
        JUDGED,
        "assert not getattr(self, '_busy', False); self._busy = True; await asyncio.sleep(0.01);"
        f" found = {JUDGED[7:]}; self._busy = False; return found",
        "test_a_cancelled_call_leaves_it_usable",
    ),
)
