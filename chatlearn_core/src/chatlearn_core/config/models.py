"""The shape of a run's configuration, as pydantic models. Reading YAML into them is ``load.py``'s part.

Nothing here knows a backend: ``options`` are validated by the model that the selected plugin supplies, and
``engine`` holds engine-native arguments that the backend checks itself.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""At most 31 years, which every timer of the standard library takes."""
Copies = Annotated[int, Field(ge=1, le=65536)]
"""Ranks and replicas: each is a process or more."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced across types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """The model that trainer and generator roles hold unless they name their own."""

    path: str = Field(description="A Hugging Face model directory, or a hub id where there is a network.")
    tokenizer: str | None = Field(None, description="Tokenizer directory or hub id; the model's own by default.")
    max_length: Positive | None = Field(None, description="Longest sequence, tokens; the model's own limit by default.")
    trust_remote_code: bool = False


class DatasetConfig(Section):
    """One dataset file, directory or hub id."""

    path: str
    format: str = Field("auto", description="A dataset format by plugin name, or auto.")
    split: str | None = Field(None, description="Split of a hub dataset.")
    weight: float = Field(1.0, gt=0, description="Share among the training datasets, relative to the others'.")
    name: str | None = Field(None, description="data_source of its rows where they carry none; the file's stem.")
    limit: Positive | None = Field(None, description="Use only the first rows.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the format's plugin.")


class PluginChoice(Section):
    """A plugin by name with its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class ScheduleChoice(PluginChoice):
    """A setting that changes with the steps, and the plugin that says how."""

    setting: str = Field(description="sampling.max_tokens, or algorithm.options.<name> where the algorithm takes it.")


class DataConfig(Section):
    """What is trained and evaluated on."""

    train: list[DatasetConfig] = Field(min_length=1)
    eval: list[DatasetConfig] = Field(default_factory=list)
    max_prompt_tokens: Positive | None = Field(
        None, description="Longer prompts are filtered out and counted; by default what leaves room for a completion."
    )
    apply_chat_template: bool = Field(True, description="Render chat messages with the tokenizer's template.")
    system_prompt: str | None = Field(None, description="Put before the messages of prompts that have no system turn.")
    control_tokens: Literal["text", "special", "refuse"] = Field(
        "text",
        description="What control tokens such as <|im_end|> are that a row's text spells. text: encoded as characters. "
        "special: the tokens, for prompts rendered before. refuse: the row is bad. The template's are always tokens.",
    )
    shuffle: bool = True
    sampler: PluginChoice | None = Field(
        None, description="What decides which examples are drawn, by plugin name; by default shuffled."
    )
    on_bad_row: Literal["error", "skip"] = Field("error", description="skip: leave a bad row out, name and count it.")


class RewardPart(Section):
    """One reward of several that a reward role combines."""

    backend: str
    options: dict[str, Any] = Field(default_factory=dict)
    weight: float = 1.0
    data_sources: list[str] | None = Field(None, description="Only samples of these data sources; all by default.")
    uses: dict[str, str] = Field(default_factory=dict, description="Handle -> the role that it calls by it.")


class RefreshConfig(Section):
    """When a trainer role that does not learn takes the weights of one that does."""

    role: str = Field(description="The trainer role whose weights it takes.")
    every: Positive = Field(description="Steps from one refresh to the next.")
    decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share that stays of its own weights, for a moving average; 0 takes the other's as they are.",
    )


class RoleConfig(Section):
    """One role of the flow: a kind, a backend by name, and that backend's options."""

    kind: Literal["trainer", "generator", "reward", "environment"]
    backend: str | None = Field(None, description="A plugin of this kind, by name.")
    parts: list[RewardPart] = Field(default_factory=list, description="Several rewards, combined by weight.")
    model: ModelConfig | None = Field(None, description="Its own model instead of the run's.")
    head: Literal["lm", "value", "reward"] = "lm"
    trainable: bool | None = Field(None, description="By default true for the roles the algorithm gives a loss.")
    refresh: RefreshConfig | None = Field(
        None, description="Take another trainer role's weights every few steps, such as a reference the policy's."
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; not for rewards.")
    replicas: Copies = Field(1, description="Independent copies: of generators; of rewards, not on runtime local.")
    ranks: Copies = Field(1, description="Ranks of one replica.")
    options: dict[str, Any] = Field(default_factory=dict, description="The backend's options.")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="Engine-native arguments, passed verbatim; not for rewards."
    )
    uses: dict[str, str] = Field(
        default_factory=dict, description="Of an environment or a reward: handle -> the role that it calls by it."
    )
    timeout_s: Seconds = Field(1800.0, description="Longest time one call to this role may take.")

    @property
    def used_roles(self) -> frozenset[str]:
        """The roles that it calls, those of its parts included."""
        return frozenset(self.uses.values()).union(*(part.uses.values() for part in self.parts))


class SamplingConfig(Section):
    """How completions are sampled."""

    max_tokens: Positive = 512
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: NonNegative = 0
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)


class RolloutConfig(Section):
    """Who samples what, and whether a rollout may last longer than a step."""

    max_concurrent: Positive | None = Field(
        None, description="Requests that a replica has open at a time; by default all, and the engine queues them."
    )
    work_stealing: bool = Field(
        False, description="An idle replica takes over what waits for another; batches then depend on timing."
    )
    max_retries: NonNegative = Field(1, description="How often a request that failed is made again.")
    request_timeout_s: Seconds | None = Field(
        None,
        description="A request that takes longer from its start is ended and its sample excluded; none by default.",
    )
    partial: Literal["none", "resume", "keep"] = Field(
        "none",
        description="What becomes of completions that a step does not finish. none: a step waits for all of them. "
        "resume: they are taken out after round_tokens and resumed in the next step. keep: they stay in the engine.",
    )
    round_tokens: Positive | None = Field(
        None, description="For resume: tokens that a completion may grow by in a step."
    )
    max_rounds: Positive = Field(4, description="A completion ends after at most this many steps.")
    in_flight_prompts: Positive | None = Field(
        None,
        description="Prompts that a partial rollout has in flight; train.prompts_per_step for resume, twice for keep.",
    )
    filters: list[PluginChoice] = Field(
        default_factory=list, description="What decides which scored samples are not trained on, by plugin name."
    )
    max_staleness: NonNegative | None = Field(
        None,
        description="Most policy versions between the newest weights and those that sampled a token which is trained "
        "on; older groups are left out. By default 0, and with partial rollouts max_rounds - 1.",
    )
    max_refills: NonNegative = Field(
        10, description="How often a step draws further examples because its algorithm wants more than it has."
    )


class WeightSyncConfig(Section):
    """How weights travel from the trainer to the generator."""

    backend: str = Field("auto", description="A transport by name, or auto: the fastest that fits.")
    options: dict[str, Any] = Field(default_factory=dict)
    export: Literal["auto", "full_tensors", "boxes"] = Field(
        "auto",
        description="full_tensors: trainer ranks gather each tensor. boxes: each rank sends the parts it holds. auto: "
        "the transport's first choice among the forms that the trainer exports.",
    )
    payload: Literal["full", "adapter"] = Field(
        "full", description="full: the model, adapters merged in. adapter: the LoRA adapters alone."
    )
    fleet_rule: Literal["barrier", "rolling"] = Field(
        "barrier", description="barrier: all replicas change together. rolling: a few at a time, the others serve on."
    )
    max_loading: Positive = Field(1, description="Replicas that change their weights at a time, if rolling.")
    bucket_mb: Annotated[int, Field(ge=1, le=1 << 20)] = Field(256, description="Memory above the weights, MiB.")
    timeout_s: Seconds = 600.0


class RuntimeConfig(Section):
    """Which engine builds the roles and carries calls to them."""

    backend: str = "local"
    options: dict[str, Any] = Field(default_factory=dict)


class MemoryConfig(Section):
    """What happens to the memory of roles that share devices."""

    offload: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Move weights, optimizer and KV cache out of device memory while another role works. auto: on GPUs "
        "that roles share; always: on shared CPUs too; never: all stay.",
    )


class TrainConfig(Section):
    """How long, and how a step's samples become optimizer updates."""

    steps: Positive
    prompts_per_step: Positive = Field(description="Prompts (or demonstrations) drawn a step.")
    mini_batches: Positive = Field(1, description="Optimizer updates that share one epoch over a step's samples.")
    epochs: Positive = Field(1, description="Passes over a step's samples.")
    step_policies: list[PluginChoice] = Field(
        default_factory=list, description="What decides after a step whether to stop or to sample otherwise."
    )


class EvalConfig(Section):
    """Evaluation on the eval datasets."""

    every: NonNegative = Field(0, description="Steps between evaluations; 0: only before and after training.")
    at_start: bool = True
    at_end: bool = True
    sampling: SamplingConfig | None = Field(None, description="Greedy with the rollout's length by default.")
    samples_per_prompt: Copies = 1


class CheckpointConfig(Section):
    """When a run is made resumable, and what is kept."""

    every: NonNegative = Field(10, description="Steps between checkpoints; 0: only at the end.")
    keep_last: Positive = 2
    keep_best: NonNegative = Field(0, description="Beside the last, keep this many with the best metric.")
    metric: str = Field("eval/accuracy", description="Higher is better; looked up in the step's metrics.")
    export: bool = Field(True, description="Write a Hugging Face model directory when training ends.")


class LogConfig(Section):
    """What is written and shown while running."""

    loggers: list[PluginChoice] = Field(default_factory=list)
    rollouts: NonNegative = Field(64, description="Samples a step written to rollouts/ for the report; 0: none.")
    progress: bool = True


class RunConfig(Section):
    """Everything about one run."""

    name: str = "run"
    output_dir: str = Field("runs/${name}", description="Run directory.")
    seed: NonNegative = 0
    model: ModelConfig
    data: DataConfig
    algorithm: PluginChoice
    roles: dict[str, RoleConfig]
    sampling: SamplingConfig = SamplingConfig()
    schedules: list[ScheduleChoice] = Field(default_factory=list, description="Settings that change with the steps.")
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    memory: MemoryConfig = MemoryConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
