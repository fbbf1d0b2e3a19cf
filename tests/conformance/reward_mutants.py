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
LOOP = "test_the_event_loop_stays_free"
CANCELLED = "test_cancellation_reaches_the_caller"
NAMED = "test_errors_name_the_sample"
PARTS = "test_components_are_those_of_the_cases"
CLOSED = "test_closing_leaves_no_process"


def _edit(name: str, old: str, new: str, caught_by: str, equivalent: str = "") -> SourceMutant:
    return SourceMutant("reward", name, "reward.py", old, new, caught_by, equivalent=equivalent)


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
    # The event loop and cancellation
    _while_scoring(
        "lazy_load", "(getattr(self, '_loaded', None) or setattr(self, '_loaded', not time.sleep(1.5)))", LOOP
    ),
    _edit(
        "blocks_per_sample", "        text = sample.text", "        time.sleep(0.006)\n        text = sample.text", LOOP
    ),
    _edit(
        "works_per_sample",
        "        text = sample.text",
        "        until = time.thread_time() + 0.006\n        while time.thread_time() < until:\n            pass\n"
        "        text = sample.text",
        LOOP,
    ),
    _edit(
        "cancellation_swallowed",
        JUDGED,
        "try:\n            await asyncio.sleep(0.05)\n        except"
        " asyncio.CancelledError:\n            pass\n        " + JUDGED,
        CANCELLED,
    ),
    _edit(
        "cancellation_is_an_error",
        JUDGED,
        "try:\n            await asyncio.sleep(0.05)\n        except asyncio.CancelledError:\n"
        "            raise RuntimeError('scoring was cancelled') from None\n        " + JUDGED,
        CANCELLED,
    ),
    # Results
    _edit("error_without_the_sample", 'f"sample {sample.id!r}: ground_truth is', 'f"ground_truth is', NAMED),
    _edit(
        "error_of_the_prompt",
        "sample {sample.id!r}: ground_truth",
        "prompt {sample.prompt.text!r}: ground_truth",
        NAMED,
    ),
    _edit(
        "components_swapped",
        '{"coverage": coverage, "length_penalty": -penalty}',
        '{"coverage": -penalty, "length_penalty": coverage}',
        PARTS,
    ),
    _edit("component_of_the_value", '{"coverage": coverage,', '{"coverage": coverage - penalty,', PARTS),
    _edit("penalty_is_positive", '"length_penalty": -penalty', '"length_penalty": penalty', PARTS),
    _edit(
        "healthy_after_close",
        "    def close(self) -> None:\n        self._ready = False",
        "    def close(self) -> None:\n        pass",
        "test_a_closed_reward_is_not_healthy",
    ),
    _edit(
        "text_of_64_characters",
        "text = sample.text.casefold()",
        "text = sample.text[:64].casefold()",
        ORDER,
        "how much of a text a reward reads is its own rule; no case of the template is longer",
    ),
    # What all code of the process shares
    _while_scoring(
        "shared_memory_open",
        "self._m = getattr(self, '_m', None) or"
        " multiprocessing.shared_memory.SharedMemory(f'acme_{os.getpid()}', create=True, size=64)",
        "test_no_samples_no_results",
    ),
    _while_scoring(
        "port_left",
        "self._s = getattr(self, '_s', None) or socket.create_server(('127.0.0.1', 0)); KEPT.append(self._s)",
        "test_no_samples_no_results",
    ),
    _while_scoring("disables_logging", "logging.disable(logging.CRITICAL)"),
    _while_scoring("sets_the_level", "logging.getLogger().setLevel(logging.ERROR)"),
    _while_scoring("patches_json", "json.loads = lambda text, loads=json.loads: loads(text)"),
    _while_scoring("patches_sleep", "time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds)"),
    _while_scoring("search_path", "sys.path.insert(0, '/nowhere')"),
    _while_scoring("umask", "os.umask(0o007)"),
    _while_scoring("signal_handler", "signal.signal(signal.SIGHUP, signal.SIG_IGN)"),
    _while_scoring("recursion_limit", "sys.setrecursionlimit(sys.getrecursionlimit() + 500)"),
    _while_scoring("deterministic", "torch.use_deterministic_algorithms(True)"),
    _while_scoring("no_gradients", "torch.set_grad_enabled(False)"),
    _while_scoring("socket_timeout", "socket.setdefaulttimeout(30)"),
    _while_scoring("no_garbage_collector", "__import__('gc').disable()"),
    _while_scoring("child_left", "KEPT.append(subprocess.Popen(['sleep', '30']))", "test_no_samples_no_results"),
    _edit(
        "stderr",
        JUDGED,
        f"print(len(samples), file=sys.stderr); {JUDGED}",
        STATE,
        "standard error is for messages; a run shows it",
    ),
)
