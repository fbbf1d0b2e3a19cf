"""The template's runtime with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

IS_RUNTIME = "test_is_a_runtime"
STRICT = "test_options_are_described_and_strict"
BITS = "test_one_rank_gives_the_bits_of_the_local_runtime"
FOLLOWS = "test_a_trainer_follows_another"
SPLIT = "test_ranks_split_a_batch_and_merge_metrics_by_name"
FEW_RANKS = "test_more_ranks_than_it_hosts_are_refused_before_start"
REPLICAS = "test_weights_reach_every_replica"
DEAD = "test_a_dead_replica_is_reported_and_its_requests_start_again"
LIMIT = "test_a_dead_replica_beyond_its_limit_is_refused"
LOST = "test_a_lost_rank_is_rebuilt_and_goes_on_from_what_was_saved"
HANGS = "test_a_call_that_hangs_ends_by_its_timeout"
BLOCKED = "test_a_worker_with_a_blocked_event_loop_says_where"
LATE = "test_a_request_that_takes_too_long_ends_by_its_timeout"
PAUSED = "test_pause_keeps_and_abort_returns_what_was_sampled"
MOVED = "test_parts_are_moved_out_and_back"
UP = "test_roles_are_told_when_they_are_up"
LENT = "test_weights_are_lent_to_a_replica_that_comes_late"
CLOSED = "test_close_twice_leaves_nothing"
BROKEN = "test_a_role_that_does_not_start_closes_the_others"

END = "connection.fail(ProcessEndedError(self._end))"
FRAMEWORK = "    # What WorkersRuntime asks of a framework\n"
FORKED = "handle = await ProcessHandle.start("
GOT = "return [read_value(reference) for reference in references]"
CONTROL = (
    'threading.Thread(target=lambda: asyncio.run(_serve_socket(host, control)), name="control", daemon=True).start()'
)


def _edit(name: str, caught_by: str, file: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("runtime", name, f"{file}.py", old, new, caught_by)


def _override(name: str, caught_by: str, *lines: str) -> SourceMutant:
    """A method that does otherwise than the library's."""
    method = "".join(f"    {line}\n" for line in lines)
    return _edit(name, caught_by, "runtime", FRAMEWORK, f"{method}\n{FRAMEWORK}")


MUTANTS = (
    _edit("one_process_is_declared", FEW_RANKS, "plugin", 'placement="host"', 'placement="process"'),
    _edit("options_are_lax", STRICT, "options", "(WorkersOptions)", '(WorkersOptions, extra="allow")'),
    # What it says of itself
    _edit("no_devices", IS_RUNTIME, "runtime", 'return [Device("cpu", is_gpu=False)]', "return []"),
    _override("describes_no_backend", IS_RUNTIME, "def describe(self):", "    return {n: {} for n in self.plan.roles}"),
    _override(
        "describes_objects",
        IS_RUNTIME,
        "def describe(self):",
        '    return {n: {**d, "role": self.plan.roles[n]} for n, d in super().describe().items()}',
    ),
    # Values by reference
    _edit("values_come_in_reverse", SPLIT, "store", GOT, GOT.replace("references]", "references[::-1]]")),
    _edit("values_are_those_of_the_first", SPLIT, "store", GOT, GOT.replace("reference)", "references[0])")),
    _edit("results_are_not_stored", BITS, "handle", "method, arguments, stored), stored", "method, arguments), stored"),
    _edit("references_stay_references", BITS, "worker", "isinstance(one, FileReference)", "isinstance(one, bytes)"),
    # Calls
    _edit(
        "one_call_at_a_time",
        PAUSED,
        "worker",
        "task = asyncio.create_task(_answer(host, writer, *await read_frame(reader)))",
        "task = asyncio.create_task(_answer(host, writer, *await read_frame(reader)))\n            await task",
    ),
    _edit("all_calls_have_one_number", BITS, "handle", "number = next(self._numbers)", "number = 0"),
    _edit(
        "the_blocked_loop_is_asked", BLOCKED, "worker", CONTROL, "asyncio.ensure_future(_serve_socket(host, control))"
    ),
    _edit("calls_are_asked_for_stacks", BLOCKED, "handle", "self._ask(self._control", "self._ask(self._calls"),
    # Processes that end
    _edit("calls_wait_for_the_dead", DEAD, "handle", END, "pass"),
    _edit("the_dead_give_errors", LOST, "handle", END, "connection.fail(CallError(self._end))"),
    _edit("the_dead_are_called", DEAD, "handle", "if self._end is None:", "if True:"),
    _edit("nothing_is_killed", HANGS, "handle", "self._process.kill()", "pass"),
    _override("restarts_are_not_told", DEAD, "def _tell(self, event):", "    pass"),
    _edit(
        "one_restart_more",
        LIMIT,
        "runtime",
        "        super().__init__(options, plan",
        "        most = options.max_generator_restarts + 1\n"
        '        options = options.model_copy(update={"max_generator_restarts": most})\n'
        "        super().__init__(options, plan",
    ),
    _override("lost_ranks_stay_lost", LOST, "async def recover(self, lost):", "    pass"),
    _override("nothing_recovers", LOST, "async def recover(self, lost):", "    raise lost"),
    _edit(
        "timeouts_of_an_hour",
        LATE,
        "runtime",
        "        super().__init__(options, plan",
        "        longer = {name: replace(role, timeout_s=3600.0) for name, role in plan.roles.items()}\n"
        "        plan = replace(plan, roles=longer)\n"
        "        super().__init__(options, plan",
    ),
    # Weights
    _override(
        "receipts_in_reverse",
        REPLICAS,
        "async def sync_weights(self, *arguments):",
        "    return (await super().sync_weights(*arguments))[::-1]",
    ),
    _override(
        "one_replica_gets_weights",
        REPLICAS,
        "async def sync_weights(self, trainer, generator, policy_version):",
        "    transfer = self._transfers[trainer, generator]",
        "    return await self._fleets[generator].sync(",
        "        policy_version, lambda: transfer.sync([0], policy_version), transfer.resync, transfer.keeps)",
    ),
    _override(
        "followers_are_said_to_follow", FOLLOWS, "async def refresh_weights(self, *arguments):", "    return True"
    ),
    _override(
        "late_weights_are_not_lent",
        LENT,
        "async def sync_weights(self, *arguments):",
        "    self.lend_weights = lambda role: __import__('contextlib').nullcontext()",
        "    return await super().sync_weights(*arguments)",
    ),
    # Roles
    _override(
        "roles_are_up_unnoticed",
        UP,
        "async def start(self, role_is_up=None):",
        "    await super().start()",
    ),
    _override(
        "all_roles_are_up_at_once",
        UP,
        "async def start(self, role_is_up=None):",
        "    await super().start()",
        "    for name in self.plan.roles:",
        "        await role_is_up(name) if role_is_up is not None else None",
    ),
    _override(
        "every_sequence_twice",
        SPLIT,
        "def trainer(self, role):",
        "    group = super().trainer(role)",
        "    group.derive = lambda batch, function, split='group': type(group).derive(group, batch, function, 'whole')",
        "    return group",
    ),
    _override(
        "moves_are_not_told",
        MOVED,
        "def trainer(self, role):",
        "    group = super().trainer(role)",
        "    async def offload(parts):",
        "        await type(group).offload(group, parts)",
        "        return []",
        "    group.offload = offload",
        "    return group",
    ),
    # The end
    _edit("the_server_stays", CLOSED, "runtime", "self._server.close()\n", "pass\n"),
    _edit("the_store_stays", CLOSED, "runtime", "shutil.rmtree(self._folder, ignore_errors=True)", "pass"),
    _edit(
        "workers_stay_if_a_role_does_not_start",
        BROKEN,
        "runtime",
        FRAMEWORK,
        "    async def start(self, role_is_up=None):\n"
        "        close, self.close = self.close, lambda: asyncio.sleep(0)\n"
        "        await super().start(role_is_up)\n"
        "        self.close = close\n\n" + FRAMEWORK,
    ),
)
