"""The template's rollout mode with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

PLAN = "test_the_plan_says_what_runs_together"
SYNC = "test_without_staleness_it_is_sync"
SAMPLES = "test_steps_train_on_the_samples_of_sync"
AGAIN = "test_an_algorithm_that_asks_again_gets_other_samples"
VERSIONS = "test_every_token_has_the_version_and_logprob_of_its_weights"
GOES_ON = "test_a_stopped_run_goes_on"
ERROR = "test_an_error_ends_the_run"
FINITE = "test_metrics_are_finite"
LEFT = "test_nothing_outlives_a_run"
STRICT = "test_options_are_described_and_strict"
LIGHT = "test_nothing_heavy_is_imported_before_a_run"

WAIT = "await asyncio.wait([self._ahead])\n            self._ahead.result()"
SNAPSHOT = "self.pending = await self._snapshot()"
ALL = "buffer.admit([*self._made, *ahead])"
SPLIT = "groups, self._made = groups[:missing], groups[missing:]"
BEGINS = "if is_first and self._first_step is not None and self._first_step <= step < self._train.steps:"
WANTED = "self._train.prompts_per_step - len(self._made)"
RESTORED = "self._made = [FinishedGroup(tuple(group.requests)).copy() for group in self.pending]"
DRAWN = "draws = next_draws(self.sampler, count)"
LINES = "return lines"
AHEAD_OF_TIME = "metrics = {"
CANCEL = "self._ahead.cancel()\n            await asyncio.gather(self._ahead, return_exceptions=True)"


def _edit(name: str, caught_by: str, file: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("rollout_mode", name, f"{file}.py", old, new, caught_by)


def _producer(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return _edit(name, caught_by, "producer", old, new)


MUTANTS = (
    _edit("options_are_lax", STRICT, "options", 'extra="forbid", ', ""),
    _edit(
        "options_import_torch",
        LIGHT,
        "options",
        "from pydantic import BaseModel",
        "import torch\nfrom pydantic import BaseModel",
    ),
    # The plan
    _edit("the_plan_is_silent", PLAN, "plan", LINES, "return []"),
    _edit("the_plan_grows", PLAN, "plan", LINES, "SAID.extend(lines)\n    return list(SAID)\n\n\nSAID: list[str] = []"),
    _edit("the_plan_is_a_number", PLAN, "plan", LINES, "return [1]"),
    _edit(
        "the_plan_changes_the_run",
        PLAN,
        "plan",
        LINES,
        'object.__setattr__(loaded.config, "name", "x")\n    return lines',
    ),
    # sync
    _producer("no_staleness_is_one", SYNC, "if context.max_staleness else None", "if True else None"),
    _producer("another_seed", SYNC, "        assembly.config.seed,\n", "        assembly.config.seed + 1,\n"),
    _producer(
        "greedy_sampling",
        SYNC,
        "sampling = self.decisions.sampling_at(step, self.sampling)",
        "sampling = replace(self.sampling, temperature=0.5)",
    ),
    # Samples
    _producer("the_last_drawn_first", SAMPLES, SPLIT, "groups.reverse()\n        " + SPLIT),
    _producer(
        "as_they_finish",
        SAMPLES,
        SPLIT,
        "groups.sort(key=lambda g: sum(s.num_completion_tokens for s in g.samples))\n        " + SPLIT,
    ),
    _producer("a_group_less", SAMPLES, SPLIT, "groups, self._made = groups[:missing - (step > 2)], groups[missing:]"),
    _producer("a_group_twice", SAMPLES, SPLIT, f"{SPLIT}\n        groups[-1] = groups[0] if step == 3 else groups[-1]"),
    _producer("the_rest_is_lost", GOES_ON, ALL, "buffer.admit([*self._made, *ahead[1:]])"),
    _producer(
        "the_longest_are_left_out",
        SAMPLES,
        SPLIT,
        "groups = [g for g in groups if all(s.num_completion_tokens < 24 for s in g.samples)] or groups\n"
        "        " + SPLIT,
    ),
    _producer("two_steps_ahead", SAMPLES, WANTED, "2 * self._train.prompts_per_step - len(self._made)"),
    _producer("drawn_in_vain_at_the_end", GOES_ON, DRAWN, f"next_draws(self.sampler, 1)\n        {DRAWN}"),
    _producer("groups_again", AGAIN, "ahead, self._ahead = self._ahead, None", "ahead = self._ahead"),
    # Versions
    _producer(
        "the_sync_does_not_wait",
        VERSIONS,
        f"            {WAIT}\n        {SNAPSHOT}",
        "            pass\n        self.pending = ()",
    ),
    _producer(
        "logprobs_of_another_temperature",
        VERSIONS,
        SPLIT,
        "for sample in (s for g in groups for s in g.samples):\n"
        '            data = sample.token_data["generator_logprobs"]\n'
        '            sample.token_data["generator_logprobs"] = data / 0.7\n        ' + SPLIT,
    ),
    # Checkpoints
    _producer("nothing_is_kept", GOES_ON, SNAPSHOT, "self.pending = ()"),
    _producer("nothing_is_restored", GOES_ON, RESTORED, "self._made = []"),
    _producer("restored_in_reverse", GOES_ON, RESTORED, RESTORED.replace("self.pending]", "self.pending[::-1]]")),
    _producer("only_what_is_left_over_is_kept", GOES_ON, ALL, "buffer.admit(self._made)"),
    # Errors, metrics and the end
    _producer(
        "errors_are_dropped",
        ERROR,
        "self._ahead.result()\n        self.pending",
        "self._ahead = None if self._ahead.exception() else self._ahead\n        self.pending",
    ),
    _producer("no_number", FINITE, 'Metric(len(groups), reducer="sum")', 'Metric(float("nan"), reducer="sum")'),
    _producer("tasks_stay", LEFT, CANCEL, "pass"),
    _producer(
        "a_thread_stays",
        LEFT,
        AHEAD_OF_TIME,
        f"threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        {AHEAD_OF_TIME}",
    ),
    _producer(
        "a_file_stays", LEFT, AHEAD_OF_TIME, f'open(tempfile.mkstemp()[1], "w").close()\n        {AHEAD_OF_TIME}'
    ),
)
