"""Every hook, in the order in which a run calls them. Specifications only.

**Registering hooks** (plural nouns) are called when plugins load, before any device is touched; they return records.
The records of all plugins are merged and a run selects by name: no plugin overrides another.
**Observing hooks** are broadcast while a run works. They return nothing and change nothing: each implementation gets
copies of its own, and the random numbers it draws do not affect the run's. An implementation that raises is logged and
counted, and stops the run only under strict mode.

An implementation may take any subset of a hook's arguments, by name. Any plugin may implement any hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from chatlearn_core.plugins.markers import hookspec

if TYPE_CHECKING:
    from pathlib import Path

    from chatlearn_core.flow import Graph
    from chatlearn_core.plugins.records import (
        AggregationSpec,
        AlgorithmSpec,
        CliCommandSpec,
        DatasetSpec,
        EnvironmentSpec,
        ExampleKindSpec,
        FlowMethodSpec,
        GeneratorSpec,
        LauncherSpec,
        LoggerSpec,
        ModelFamilySpec,
        OutputSpec,
        RewardSpec,
        RolloutModeSpec,
        RuntimeSpec,
        SampleFilterSpec,
        SamplerSpec,
        ScheduleSpec,
        StepPolicySpec,
        ToolSpec,
        TrainerSpec,
        WeightSyncSpec,
    )
    from chatlearn_core.protocols import DataStore
    from chatlearn_core.types import RunFailure, Sample, SyncReceipt

RunStatus = Literal["completed", "interrupted", "failed"]

# --------------------------------------------------------------------------------------------- registering hooks


@hookspec
def chatlearn_cli_commands() -> Iterable[CliCommandSpec]:
    """Register commands below ``chatlearn``.

    ``chatlearn --help`` shows name and
    ``help`` from the record; ``app`` is imported when the command is used. A function is one command; a
    ``typer.Typer`` is a group of commands, even if it holds only one. A name such as ``plugins weigh`` puts the command
    below ``chatlearn plugins``, the only group that accepts further commands.

    Called: when the command line starts, unless the command is one of its own; as the other registering hooks; once
    for each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import CliCommandSpec

        @hookimpl
        def chatlearn_cli_commands():
            return [CliCommandSpec(name="acme", app="acme_chatlearn.cli:app", help="Inspect Acme clusters.")]
    """
    raise NotImplementedError


@hookspec
def chatlearn_runtimes() -> Iterable[RuntimeSpec]:
    """Register runtimes: they build the roles and forward calls to them.

    A run selects one with ``runtime.backend``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import RuntimeSpec

        @hookimpl
        def chatlearn_runtimes():
            return [
                RuntimeSpec(
                    name="slurm",
                    summary="One worker per Slurm task.",
                    factory="acme_slurm.runtime:SlurmRuntime",
                    options="acme_slurm.options:SlurmOptions",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_launchers() -> Iterable[LauncherSpec]:
    """Register launchers: programs that start a process on each node of a cluster and tell it its part.

    ``chatlearn cluster up`` asks them in ascending ``order``, or the one that ``--launcher`` names.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import LauncherSpec

        @hookimpl
        def chatlearn_launchers():
            return [
                LauncherSpec(
                    name="lsf",
                    summary="Jobs of IBM Spectrum LSF.",
                    function="acme_cluster.lsf:lsf",
                    recognised_by=("LSB_JOBID",),
                    order=400,
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_model_families() -> Iterable[ModelFamilySpec]:
    """Register readers of model families: tokenizer, prompts, limits, and where trainers with layers of their own put
    the parameters (``layouts``).

    The ``model_type`` in the model directory's ``config.json`` selects the family.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import ModelFamilySpec

        @hookimpl
        def chatlearn_model_families():
            return [
                ModelFamilySpec(
                    name="acme",
                    factory="acme_models.family:AcmeFamily",
                    options="acme_models.options:AcmeFamilyOptions",
                    model_types=frozenset({"acme", "acme_moe"}),
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_datasets() -> Iterable[DatasetSpec]:
    """Register dataset formats: they say which column of a row is the prompt, an answer, a completion.

    A dataset selects one with ``format``; ``format: auto`` takes the format with the most
    ``columns`` among those whose columns the file has.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import DatasetSpec

        @hookimpl
        def chatlearn_datasets():
            return [
                DatasetSpec(
                    name="acme_tickets",
                    summary="Support tickets as chat prompts.",
                    factory="acme_data.tickets:TicketFormat",
                    options="acme_data.options:TicketOptions",
                    columns=frozenset({"ticket_id", "thread", "resolution"}),
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_example_kinds() -> Iterable[ExampleKindSpec]:
    """Register kinds of examples: the result of reading rows, and the samples it yields without a generator.

    An algorithm selects one with its attribute ``input``; the core has ``prompts``,
    ``demonstrations`` and ``preferences``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import ExampleKindSpec

        @hookimpl
        def chatlearn_example_kinds():
            return [
                ExampleKindSpec(
                    name="rewrites",
                    summary="A text and a human's improvement of it.",
                    factory="acme_data.rewrites:Rewrites",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_algorithms() -> Iterable[AlgorithmSpec]:
    """Register algorithms: a flow over roles, advantages and losses.

    A run selects one with ``algorithm.name``; the configuration must define its ``roles``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import AlgorithmSpec

        @hookimpl
        def chatlearn_algorithms():
            return [
                AlgorithmSpec(
                    name="acme_po",
                    summary="Acme policy optimization.",
                    factory="acme_algorithms.acme_po:AcmePO",
                    options="acme_algorithms.options:AcmePOOptions",
                    roles=(("policy", "trainer"), ("generator", "generator"), ("reward", "reward")),
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_environments() -> Iterable[EnvironmentSpec]:
    """Register environments: they make rollouts of several turns with a generator.

    A role of kind ``environment`` selects one with ``backend``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import EnvironmentSpec

        @hookimpl
        def chatlearn_environments():
            return [
                EnvironmentSpec(
                    name="browser",
                    summary="A headless browser as a tool.",
                    factory="acme_browser.environment:Browser",
                    options="acme_browser.options:BrowserOptions",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_tools() -> Iterable[ToolSpec]:
    """Register sources of tools that a policy can call during a rollout.

    The environment ``tools`` opens those that its option ``tools`` names by ``kind``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import ToolSpec

        @hookimpl
        def chatlearn_tools():
            return [
                ToolSpec(
                    name="timetable",
                    summary="Departures of trains.",
                    factory="acme_travel.timetable:Timetable",
                    options="acme_travel.options:TimetableOptions",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_trainers() -> Iterable[TrainerSpec]:
    """Register trainers: one object per rank that computes per-token outputs and updates the model.

    A role of kind ``trainer`` selects one with ``backend``. The heads, outputs and exports of
    the record are checked against the algorithm and the transport before anything starts.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import TrainerSpec

        @hookimpl
        def chatlearn_trainers():
            return [
                TrainerSpec(
                    name="acme",
                    summary="Acme's parallel trainer.",
                    factory="acme_trainer.trainer:AcmeTrainer",
                    options="acme_trainer.options:AcmeTrainerOptions",
                    heads=frozenset({"lm", "value"}),
                    outputs=frozenset({"logprobs", "entropy", "values"}),
                    exports=frozenset({"full_tensors", "boxes"}),
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """Register generators: one object per replica that samples completions.

    A role of kind ``generator`` selects one with ``backend``. ``requires`` lists the engine's
    distributions as alternatives; they are looked up in the metadata of the interpreter that will host the engine,
    never imported.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import GeneratorSpec

        @hookimpl
        def chatlearn_generators():
            return [
                GeneratorSpec(
                    name="acme",
                    summary="Acme's serving engine.",
                    factory="acme_generator.generator:AcmeGenerator",
                    options="acme_generator.options:AcmeGeneratorOptions",
                    requires=(("pluggy>=1", "pluggy-cpu>=1"),),
                    channels=frozenset({"tensors", "checkpoint"}),
                    own_interpreter=True,
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_rewards() -> Iterable[RewardSpec]:
    """Register rewards: they score samples one by one or in whole groups.

    A role of kind ``reward``, or a part of one, selects by ``backend``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import RewardSpec

        @hookimpl
        def chatlearn_rewards():
            return [
                RewardSpec(
                    name="unit_tests",
                    summary="Share of unit tests that pass.",
                    factory="acme_rewards.unit_tests:UnitTestReward",
                    options="acme_rewards.options:UnitTestOptions",
                    unit="sample",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_weight_syncs() -> Iterable[WeightSyncSpec]:
    """Register transports that move policy weights from the trainer to the generators.

    A run selects one with ``weight_sync.backend``; ``auto`` takes the one with the lowest
    ``speed_rank`` among those that the two ends and their placement support.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import WeightSyncSpec

        @hookimpl
        def chatlearn_weight_syncs():
            return [
                WeightSyncSpec(
                    name="nfs",
                    summary="Checkpoint files on a shared file system.",
                    sender="acme_sync.nfs:Sender",
                    receiver="acme_sync.nfs:Receiver",
                    options="acme_sync.options:NfsOptions",
                    exports=("full_tensors",),
                    channels=("checkpoint",),
                    reach="anywhere",
                    replayable=True,
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_loggers() -> Iterable[LoggerSpec]:
    """Register loggers: destinations of metrics in addition to ``metrics.jsonl``.

    A run selects any number with ``log.loggers``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import LoggerSpec

        @hookimpl
        def chatlearn_loggers():
            return [
                LoggerSpec(
                    name="statsd",
                    summary="Gauges over UDP.",
                    factory="acme_logging.statsd:StatsdLogger",
                    options="acme_logging.options:StatsdOptions",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_samplers() -> Iterable[SamplerSpec]:
    """Register samplers: they decide which training examples are drawn, and in which order.

    A run selects one with ``data.sampler``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import SamplerSpec

        @hookimpl
        def chatlearn_samplers():
            return [
                SamplerSpec(
                    name="easy_first",
                    summary="Examples in order of measured difficulty.",
                    factory="acme_rl.curriculum:EasyFirst",
                    options="acme_rl.options:EasyFirstOptions",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_sample_filters() -> Iterable[SampleFilterSpec]:
    """Register filters: they exclude scored samples from training, or change the rewards that are trained on.

    A run selects any number with ``rollout.filters``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import SampleFilterSpec

        @hookimpl
        def chatlearn_sample_filters():
            return [
                SampleFilterSpec(
                    name="no_refusals",
                    summary="Leaves out completions that refuse to answer.",
                    factory="acme_rl.refusals:NoRefusals",
                    options="acme_rl.options:NoRefusalsOptions",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_schedules() -> Iterable[ScheduleSpec]:
    """Register schedules: numbers that depend on the step.

    ``schedules`` in the configuration selects one for each scheduled setting.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import ScheduleSpec

        @hookimpl
        def chatlearn_schedules():
            return [
                ScheduleSpec(
                    name="cosine",
                    summary="From one value to another along half a cosine.",
                    factory="acme_rl.cosine:Cosine",
                    options="acme_rl.options:CosineOptions",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_step_policies() -> Iterable[StepPolicySpec]:
    """Register step policies: they decide after each step whether to stop the run or change its sampling.

    A run selects any number with ``train.step_policies``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import StepPolicySpec

        @hookimpl
        def chatlearn_step_policies():
            return [
                StepPolicySpec(
                    name="budget",
                    summary="Ends the run after training on a given number of tokens.",
                    factory="acme_rl.budget:TokenBudget",
                    options="acme_rl.options:TokenBudgetOptions",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_rollout_modes() -> Iterable[RolloutModeSpec]:
    """Register rollout modes: when rollouts are made in relation to updates, beside ``sync``, which the core has.

    A run selects one with ``rollout.mode``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import RolloutModeSpec

        @hookimpl
        def chatlearn_rollout_modes():
            return [
                RolloutModeSpec(
                    name="overnight",
                    summary="Rollouts of a whole epoch are made before the first update.",
                    factory="acme_rl.overnight:producer",
                    options="acme_rl.options:OvernightOptions",
                    max_staleness=1000,
                    plan="acme_rl.overnight:plan",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_outputs() -> Iterable[OutputSpec]:
    """Register outputs: values that trainers can compute per token or per sequence, by name, shape and type.

    A trainer lists the outputs that it computes in ``TrainerSpec.outputs``; a loss reads them
    through ``OutputRequest.names``, a flow through a method of ``chatlearn_flow_methods``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import OutputSpec

        @hookimpl
        def chatlearn_outputs():
            return [OutputSpec(name="margin", summary="Logit of the token minus the largest other one.", head="lm")]
    """
    raise NotImplementedError


@hookspec
def chatlearn_flow_methods() -> Iterable[FlowMethodSpec]:
    """Register calls that flows can make on roles of a kind.

    The trainer role computes ``outputs``, and the executor adds them to the samples.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import FlowMethodSpec

        @hookimpl
        def chatlearn_flow_methods():
            return [
                FlowMethodSpec(
                    name="trainer.margin",
                    summary="Margins of the sampled tokens.",
                    arguments="chatlearn_core.flow.arguments:ComputeArguments",
                    outputs=("margin",),
                    granularity="batch",
                )
            ]
    """
    raise NotImplementedError


@hookspec
def chatlearn_aggregations() -> Iterable[AggregationSpec]:
    """Register aggregations: how the per-token losses of a mini-batch are reduced to one number.

    Algorithms select one by name with their option ``aggregation``.

    Called: when plugins load; in a child process, and in the process itself if its records cannot be stored; once for
    each state of its files.

    Example:
        from chatlearn_core.plugins import hookimpl
        from chatlearn_core.plugins.records import AggregationSpec

        @hookimpl
        def chatlearn_aggregations():
            return [
                AggregationSpec(
                    name="sqrt_length",
                    summary="Weights each sequence by the square root of its length.",
                    function="acme_losses.aggregation:sqrt_length",
                    options="acme_losses.options:NoOptions",
                )
            ]
    """
    raise NotImplementedError


# ---------------------------------------------------------------------------------------------- observing hooks


@hookspec
def chatlearn_run_start(config: Mapping[str, Any], run_dir: Path, graph: Graph) -> None:
    """A run is about to start: the configuration is valid and the run directory exists; no role is built yet.

    ``config`` is the resolved configuration as plain data, ``graph`` the traced flow of the algorithm. Called again
    when a run resumes.

    Called: when the configuration is valid and the run directory exists, before any role is built; in the driver;
    once, and again when the run resumes.

    Example:
        from chatlearn_core.plugins import hookimpl

        @hookimpl
        def chatlearn_run_start(config, run_dir):
            (run_dir / "owner.txt").write_text(config.get("name", "run"), encoding="utf-8")
    """
    raise NotImplementedError


@hookspec
def chatlearn_rollout_end(step: int, samples: Sequence[Sample], metrics: Mapping[str, float], store: DataStore) -> None:
    """The experience of one step is complete: every sample is scored, and training has not begun.

    ``samples`` are copies of the step's samples, including those excluded from training; their arrays are read-only. In
    a run with several processes they are references: ``store.get(samples, {"token_ids", "text"})`` returns samples with
    values.

    Called: when every sample of a step is scored, before its updates; in the driver; once per step.

    Example:
        from chatlearn_core.plugins import hookimpl

        seen = []

        @hookimpl
        def chatlearn_rollout_end(step, samples):
            seen.append((step, len(samples)))
    """
    raise NotImplementedError


@hookspec
def chatlearn_step_end(step: int, metrics: Mapping[str, float]) -> None:
    """A step is complete: all its updates are done. ``metrics`` is its line in ``metrics.jsonl``.

    Called: when a step's updates, syncs and metrics are complete; in the driver; once per step.

    Example:
        from chatlearn_core.plugins import hookimpl

        rewards = {}

        @hookimpl
        def chatlearn_step_end(step, metrics):
            rewards[step] = metrics.get("reward")
    """
    raise NotImplementedError


@hookspec
def chatlearn_weights_synced(policy_version: int, receipts: Sequence[SyncReceipt]) -> None:
    """The generators have answered a weight sync; there is one receipt per replica, including failed ones.

    Called: when all replicas of a generator role have answered a sync; in the driver; once per generator role at the
    start, after each step that trained and after a return to a checkpoint.

    Example:
        from chatlearn_core.plugins import hookimpl

        serving = {}

        @hookimpl
        def chatlearn_weights_synced(policy_version, receipts):
            serving[policy_version] = [receipt.replica for receipt in receipts if receipt.state == "serving"]
    """
    raise NotImplementedError


@hookspec
def chatlearn_checkpoint_saved(step: int, path: Path) -> None:
    """A checkpoint is complete under its final name: a run killed from now on resumes after ``step``.

    Called: when a checkpoint has its final name; in the driver; once per checkpoint.

    Example:
        from chatlearn_core.plugins import hookimpl

        saved = []

        @hookimpl
        def chatlearn_checkpoint_saved(step, path):
            saved.append((step, path.name))
    """
    raise NotImplementedError


@hookspec
def chatlearn_error(error: BaseException, failure: RunFailure) -> None:
    """A run fails with ``error``, the exception itself; ``chatlearn_run_end`` follows. Not called for Ctrl-C.

    Called after the last complete step was saved, if that was possible. ``failure`` says which step and phase the run
    was in and what is saved. Write a page for users to ``failure.run_dir / "failure.md"``: the run's failure report
    refers to it, and a resumed run removes it.

    Called: when a run fails, before its roles are closed; in the driver; at most once.

    Example:
        from chatlearn_core.plugins import hookimpl

        pages = []

        @hookimpl
        def chatlearn_error(error, failure):
            pages.append(f"step {failure.step}: {type(error).__name__}: {error}")
    """
    raise NotImplementedError


@hookspec
def chatlearn_run_end(status: RunStatus, summary: Mapping[str, Any]) -> None:
    """A run has ended and its roles are closed; ``summary`` is the content of ``summary.json``.

    ``status`` is ``completed``, ``interrupted`` (Ctrl-C or SIGTERM; it can be resumed) or ``failed``.

    Called: when the roles are closed, last of all; in the driver; once.

    Example:
        from chatlearn_core.plugins import hookimpl

        ended = []

        @hookimpl
        def chatlearn_run_end(status, summary):
            ended.append((status, summary.get("eval/reward")))
    """
    raise NotImplementedError
