"""The template's rollout mode with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

PLAN = "test_the_plan_says_what_happens_when"
SYNC = "test_without_staleness_a_run_is_sync"
FIRST = "test_the_first_step_is_that_of_sync"
DRAWS = "test_steps_train_on_the_draws_of_sync"
VERSIONS = "test_every_token_is_of_the_weights_of_its_version"
WHOLE = "test_productions_are_whole"
ASKS_AGAIN = "test_an_algorithm_that_asks_again_gets_more"
STOPPED = "test_a_stopped_run_goes_on"
LOST = "test_a_lost_trainer_is_survived"
REPLACED = "test_what_is_in_flight_is_replaced_as_a_whole"
EXCLUDED = "test_one_failure_excludes_its_sample_alone"
ENDS = "test_what_ends_sync_ends_the_run"
CANCELLED = "test_a_cancelled_run_ends"
CLOSED = "test_closing_again_is_fine"
LEFT = "test_nothing_outlives_a_run"
FREE = "test_the_event_loop_stays_free"
STRICT = "test_options_are_described_and_strict"
LIGHT = "test_nothing_heavy_is_imported_before_a_run"

IMPORT = "from pydantic import BaseModel"
LINES = "    return [\n"
AHEAD = "ahead = 1 if staleness is None else staleness"
BEGIN = "self._begin(step, self._num_wanted(step, missing))"
WAIT = "while len(self._finished) < missing:"
TAKE = "groups = [self._finished.popleft() for _ in range(missing)]"
TIMERS = 'timers = Timers()\n        with timers.measure("wait_for_rollouts"):'
METRICS = 'metrics: Metrics = {"rollout/in_flight": Metric(self._num_in_flight, reducer="sum")}'
OF_ROLLOUTS = "metrics |= self.rollouts.metrics()"
DRAIN = "while self._waves:\n            await self._finish_first(Timers())"
PENDING = "self.pending = tuple(Group(list(group.requests)) for group in plain.groups)"
RESTORED = "self._is_restored = False"
RESTORE = "self._finished.extend(FinishedGroup(tuple(group.requests)).copy() for group in self.pending)"
CANCEL = "task.cancel()"
GATHER = "await asyncio.gather(*tasks, return_exceptions=True)"
FORGET_WAVES = "self._waves.clear()"
FORGET_FINISHED = "self._finished.clear()"
ANEW = "        self._is_restored = True\n\n    @property"
BORN = '        self._is_restored = True\n        """Whether'
STEPS_AHEAD = "steps_ahead = min(self.max_staleness, self.train.steps - step)"
TOTAL = "return missing + steps_ahead * self.train.prompts_per_step - self._num_in_flight"
SAMPLING = "sampling = self.decisions.sampling_at(step, self.sampling)"
REQUESTS = "requests = make_requests(draws, self.algorithm.group_size, sampling, self.seed, self.calls, self.kind)"
RUN = "task = asyncio.create_task(self.scheduler.run(requests, timers))"
AWAITED = "await asyncio.wait([wave.task])"
RAISED = "wave.task.result()"
MOVED = "self._finished.extend(finished_groups(wave.requests))"


def _mode(name: str, caught_by: str, old: str, new: str, *also: tuple[str, str]) -> SourceMutant:
    return SourceMutant("rollout_mode", name, "producer.py", old, new, caught_by, also)


def _plan(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("rollout_mode", name, "plan.py", old, new, caught_by)


MUTANTS = (
    SourceMutant("rollout_mode", "options_are_lax", "options.py", 'extra="forbid", ', "", STRICT),
    SourceMutant("rollout_mode", "options_import_torch", "options.py", IMPORT, f"import torch\n{IMPORT}", LIGHT),
    _plan("the_plan_is_empty", PLAN, LINES, "    return []\n    return [\n"),
    _plan("the_plan_prints", PLAN, AHEAD, f"{AHEAD}\n    print(ahead)"),
    _plan("the_plan_has_no_text", PLAN, LINES, "    return [\n        ahead,\n"),
    _plan("the_plan_has_the_time", PLAN, LINES, '    return [\n        f"planned at {time.time_ns()}",\n'),
    _plan("the_plan_writes_a_file", PLAN, AHEAD, f"{AHEAD}\n    Path(tempfile.mkdtemp(), 'plan').write_text('')"),
    _plan("the_plan_changes_the_run", PLAN, AHEAD, f'{AHEAD}\n    object.__setattr__(loaded.config, "name", "other")'),
    _plan("the_plan_seeds", PLAN, AHEAD, f"{AHEAD}\n    np.random.seed(loaded.config.seed)"),
    _mode("the_steps_sampling_is_ignored", SYNC, SAMPLING, "sampling = self.sampling"),
    _mode("the_sampling_is_of_the_next_step", SYNC, SAMPLING, SAMPLING.replace("(step,", "(step + 1,")),
    _mode("another_seed", SYNC, REQUESTS, REQUESTS.replace("self.seed", "self.seed + step")),
    _mode("the_default_group_size", SYNC, REQUESTS, REQUESTS.replace("self.algorithm.group_size", "1")),
    _mode("greedy", FIRST, SAMPLING, f"{SAMPLING}\n        sampling = replace(sampling, temperature=0.5)"),
    _mode("a_metric_of_the_core_is_replaced", SYNC, OF_ROLLOUTS, 'metrics["reward"] = Metric(1.0)'),
    _mode("the_last_drawn_first", DRAWS, TAKE, TAKE.replace("popleft()", "pop()")),
    _mode(
        "the_shortest_first",
        DRAWS,
        WAIT,
        "while self._waves:",
        (
            TAKE,
            "self._finished = deque(sorted(self._finished, key=lambda group: group.num_sampled_tokens))\n"
            f"        {TAKE}",
        ),
    ),
    _mode("drawn_beyond_the_last_step", DRAWS, STEPS_AHEAD, "steps_ahead = self.max_staleness"),
    _mode("nothing_is_made_ahead", VERSIONS, STEPS_AHEAD, "steps_ahead = 0"),
    _mode(
        "drawn_too_far_ahead",
        VERSIONS,
        STEPS_AHEAD,
        STEPS_AHEAD.replace("self.max_staleness", "self.max_staleness + 1"),
    ),
    _mode("what_is_in_flight_is_not_counted", VERSIONS, TOTAL, TOTAL.replace(" - self._num_in_flight", "")),
    _mode("the_sync_does_not_wait", VERSIONS, DRAIN, "pass"),
    _mode(
        "logprobs_of_another_temperature",
        VERSIONS,
        TAKE,
        f"{TAKE}\n        for sample in (sample for group in groups for sample in group.samples):\n"
        '            sample.token_data["generator_logprobs"] = sample.token_data["generator_logprobs"] / 0.7',
    ),
    _mode("one_group_less", WHOLE, TAKE, TAKE.replace("range(missing)", "range(max(1, missing - 1))")),
    _mode(
        "half_a_group", WHOLE, TAKE, f"{TAKE}\n        groups = [FinishedGroup(group.requests[:1]) for group in groups]"
    ),
    _mode("a_plain_number", WHOLE, METRICS, 'metrics: Metrics = {"rollout/in_flight": self._num_in_flight}'),
    _mode("not_a_number", WHOLE, METRICS, METRICS.replace("Metric(self._num_in_flight", 'Metric(float("nan")')),
    _mode("a_metric_without_a_name", WHOLE, METRICS, METRICS.replace('"rollout/in_flight"', '"Rollouts in flight"')),
    _mode(
        "timers_of_all_steps",
        WHOLE,
        TIMERS,
        TIMERS.replace("Timers()", "self.timers", 1),
        (BORN, f"        self.timers = Timers()\n{BORN}"),
    ),
    _mode(
        "the_step_is_all_that_is_missing",
        ASKS_AGAIN,
        TOTAL,
        TOTAL.replace("missing +", "self.train.prompts_per_step +"),
    ),
    _mode("asking_again_draws_everything", ASKS_AGAIN, TOTAL, TOTAL.replace("- self", "- (missing % 3 == 0) * self")),
    _mode(
        "asking_again_forgets",
        ASKS_AGAIN,
        BEGIN,
        f"if missing < 3:\n            self._finished.clear()\n        {BEGIN}",
    ),
    _mode("the_checkpoint_is_empty", STOPPED, PENDING, "self.pending = ()"),
    _mode("the_checkpoint_lacks_a_group", STOPPED, PENDING, PENDING.replace("plain.groups", "plain.groups[1:]")),
    _mode(
        "the_checkpoint_is_of_the_step_before",
        STOPPED,
        PENDING,
        ("self.earlier, self.pending = tuple(Group(list(group.requests)) for group in plain.groups), self.earlier"),
        (BORN, f"        self.earlier = ()\n{BORN}"),
    ),
    _mode("the_checkpoint_is_not_restored", STOPPED, RESTORE, "pass"),
    _mode("restored_in_reverse", STOPPED, RESTORE, RESTORE.replace("in self.pending", "in reversed(self.pending)")),
    _mode("restored_after_each_step", DRAWS, RESTORED, "pass"),
    _mode("not_restored_after_close", LOST, ANEW, "\n    @property"),
    _mode("close_keeps_what_is_finished", LOST, FORGET_FINISHED, "pass"),
    _mode("close_keeps_the_waves", LOST, FORGET_WAVES, "pass"),
    _mode(
        "the_checkpoint_changes_later",
        REPLACED,
        TAKE,
        (f"{TAKE}\n        for group in self.pending:\n            group.requests.clear()"),
    ),
    _mode(
        "a_list_in_flight",
        REPLACED,
        PENDING,
        PENDING.replace(
            "tuple(Group(list(group.requests)) for group in plain.groups)",
            "[Group(list(group.requests)) for group in plain.groups]",
        ),
    ),
    _mode(
        "a_failure_ends_the_run",
        EXCLUDED,
        MOVED,
        (
            f"{MOVED}\n        for request in wave.requests:\n"
            "            if request.filled.exclusion:\n                raise ValueError(request.filled.exclusion)"
        ),
    ),
    _mode(
        "failed_samples_are_admitted",
        EXCLUDED,
        MOVED,
        (f"{MOVED}\n        for request in wave.requests:\n            request.filled.exclusion = None"),
    ),
    _mode("errors_are_passed_over", ENDS, RAISED, "wave.task.exception()"),
    _mode(
        "another_error",
        ENDS,
        RAISED,
        ("if wave.task.exception() is not None:\n            raise DataError('rollouts failed')"),
    ),
    _mode("close_cancels_nothing", CANCELLED, CANCEL, "pass"),
    _mode("close_does_not_wait", CANCELLED, GATHER, "pass"),
    _mode(
        "cancellation_is_hidden",
        CANCELLED,
        AWAITED,
        (
            "while not wave.task.done():\n            with contextlib.suppress(asyncio.CancelledError):\n"
            "                await asyncio.wait([wave.task])"
        ),
    ),
    _mode(
        "closing_twice_is_an_error",
        CLOSED,
        GATHER,
        (
            f"{GATHER}\n        assert not (self.is_closed and self._is_restored), 'closed twice'\n"
            "        self.is_closed = not self._is_restored"
        ),
        (BORN, f"        self.is_closed = False\n{BORN}"),
    ),
    _mode(
        "a_thread_stays",
        LEFT,
        TIMERS,
        f"threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        {TIMERS}",
    ),
    _mode("a_file_stays", LEFT, TIMERS, f'open(tempfile.mkstemp()[1], "w").close()\n        {TIMERS}'),
    _mode("sleeps_on_the_event_loop", FREE, BEGIN, f"time.sleep(0.3)\n        {BEGIN}"),
    _mode("computes_on_the_event_loop", FREE, TAKE, f"{TAKE}\n        sum(range(30_000_000))"),
)
