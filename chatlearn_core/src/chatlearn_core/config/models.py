"""The shape of a run's configuration as pydantic models; ``load.py`` reads YAML into them.

Nothing here depends on a backend: the selected plugin's model validates ``options``, and ``engine`` holds
engine-native arguments that the backend checks itself.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""At most 31 years, which every timer of the standard library accepts."""
SYNC = "sync"
"""The rollout mode of the core, which is no plugin: rollouts, then updates."""
Copies = Annotated[int, Field(ge=1, le=65536)]
"""Ranks and replicas, each of which is at least one process."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced across types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """The model of trainer and generator roles that do not name their own."""

    path: str = Field(description="A Hugging Face model directory, or a hub id if there is a network.")
    tokenizer: str | None = Field(None, description="Tokenizer directory or hub id; the model's own by default.")
    max_length: Positive | None = Field(None, description="Longest sequence, tokens; the model's own limit by default.")
    trust_remote_code: bool = False


class DatasetConfig(Section):
    """One dataset file, directory or hub id."""

    path: str
    format: str = Field("auto", description="A dataset format by plugin name, or auto.")
    split: str | None = Field(None, description="Split of a hub dataset.")
    weight: float = Field(1.0, gt=0, description="Share among the training datasets, relative to the others' weights.")
    name: str | None = Field(None, description="data_source of rows that have none; by default the file's stem.")
    limit: Positive | None = Field(None, description="Use only the first rows.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the format's plugin.")


class PluginChoice(Section):
    """A plugin by name with its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class ScheduleChoice(PluginChoice):
    """A setting that changes over the steps, and the plugin that computes it."""

    setting: str = Field(description="sampling.max_tokens, or algorithm.options.<name> if the algorithm supports it.")


class DataConfig(Section):
    """The data for training and evaluation."""

    train: list[DatasetConfig] = Field(min_length=1)
    eval: list[DatasetConfig] = Field(default_factory=list)
    max_prompt_tokens: Positive | None = Field(
        None, description="Longer prompts are filtered out and counted; by default leaves room for a completion."
    )
    apply_chat_template: bool = Field(True, description="Render chat messages with the tokenizer's template.")
    system_prompt: str | None = Field(None, description="Put before the messages of prompts without a system turn.")
    control_tokens: Literal["text", "special", "refuse"] = Field(
        "text",
        description="Treatment of control tokens such as <|im_end|> spelled out in a row's text. text: plain text. "
        "special: as the tokens, for rendered prompts. refuse: the row is bad. The template's own are always tokens.",
    )
    shuffle: bool = True
    sampler: PluginChoice | None = Field(
        None, description="The sampler, which decides which examples are drawn, by plugin name; by default shuffled."
    )
    on_bad_row: Literal["error", "skip"] = Field("error", description="skip: leave out bad rows, listed and counted.")


class RewardGate(Section):
    """When a part of a reward counts: another part's value must reach a threshold."""

    part: int = Field(ge=0, description="The other part, by its place in parts, from 0.")
    at_least: float = Field(description="The smallest value of the other part, before its weight.")


class RewardPart(Section):
    """One reward of several that a reward role combines."""

    backend: str
    options: dict[str, Any] = Field(default_factory=dict)
    weight: float = 1.0
    data_sources: list[str] | None = Field(None, description="Only samples of these data sources; all by default.")
    gate: RewardGate | None = Field(None, description="Counts only where another part's value is high enough, else 0.")
    uses: dict[str, str] = Field(default_factory=dict, description="Handle -> the role that the reward calls by it.")


class RefreshConfig(Section):
    """When a trainer role that is not trained takes the weights of a trained role."""

    role: str = Field(description="The trainer role whose weights are taken.")
    every: Positive = Field(description="Steps from one refresh to the next.")
    decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share kept of the role's own weights, for a moving average; 0 copies the other's weights.",
    )


class RoleConfig(Section):
    """One role of the flow: a kind, a backend by name, and that backend's options."""

    kind: Literal["trainer", "generator", "reward", "environment"]
    backend: str | None = Field(None, description="A plugin of this kind, by name.")
    parts: list[RewardPart] = Field(default_factory=list, description="Several rewards, combined by weight.")
    model: ModelConfig | None = Field(None, description="The role's own model instead of the run's.")
    head: Literal["lm", "value", "reward"] = "lm"
    trainable: bool | None = Field(None, description="By default true for roles to which the algorithm gives a loss.")
    refresh: RefreshConfig | None = Field(
        None, description="Take another trainer role's weights every few steps, such as the policy's for a reference."
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; not for rewards.")
    replicas: Copies = Field(1, description="Independent copies of a generator, or of a reward (not on runtime local).")
    ranks: Copies = Field(1, description="Ranks of one replica.")
    options: dict[str, Any] = Field(default_factory=dict, description="The backend's options.")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="Engine-native arguments, passed unchanged; not for rewards."
    )
    uses: dict[str, str] = Field(
        default_factory=dict, description="For an environment or reward: handle -> the role that it calls by it."
    )
    max_turns: Positive | None = Field(
        None, description="For an environment: maximum number of turns of one rollout; by default no limit."
    )
    timeout_s: Seconds = Field(1800.0, description="Maximum time of one call to this role.")

    @property
    def used_roles(self) -> frozenset[str]:
        """The roles that this role calls, including those that its parts call."""
        return frozenset(self.uses.values()).union(*(part.uses.values() for part in self.parts))


class SamplingConfig(Section):
    """How completions are sampled."""

    max_tokens: Positive = 512
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: NonNegative = 0
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    max_kept_ids: Positive | None = Field(
        None,
        description="Room for the ids that a token was sampled from, for truncated logprobs in training; by default "
        "room for top_k and ties. A completion that needs more fails and is counted.",
    )


class RolloutConfig(Section):
    """When rollouts are made, their distribution over replicas, and rollouts that may last longer than a step."""

    mode: str = Field(
        SYNC,
        description="When rollouts are made in relation to updates. sync: in turns. Other modes are plugins: "
        "one_step_off, async.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the mode's plugin.")

    max_concurrent: Positive | None = Field(
        None, description="Maximum number of open requests per replica; by default all, and the engine queues them."
    )
    work_stealing: bool = Field(
        False, description="An idle replica takes over requests waiting for another; batches then depend on timing."
    )
    max_retries: NonNegative = Field(1, description="How often a failed request is repeated.")
    request_timeout_s: Seconds | None = Field(
        None,
        description="A request that takes longer after its start is aborted and its sample excluded; none by default.",
    )
    partial: Literal["none", "resume", "keep"] = Field(
        "none",
        description="Handling of completions that a step does not finish. none: a step waits for all of them. "
        "resume: they stop after round_tokens and resume in the next step. keep: they stay in the engine.",
    )
    round_tokens: Positive | None = Field(
        None, description="For resume: maximum number of tokens that a completion grows by in a step."
    )
    max_rounds: Positive = Field(4, description="A completion ends after at most this many steps.")
    in_flight_prompts: Positive | None = Field(
        None,
        description="Prompts in flight in partial rollouts; train.prompts_per_step for resume, twice that for keep.",
    )
    filters: list[PluginChoice] = Field(
        default_factory=list, description="Filters, which exclude scored samples from training, by plugin name."
    )
    max_staleness: NonNegative | None = Field(
        None,
        description="Maximum number of policy versions between the newest weights and those that sampled a trained "
        "token; older groups are excluded. By default 0, with partial rollouts max_rounds - 1; otherwise the mode's.",
    )
    max_refills: NonNegative = Field(
        10, description="How often a step may draw further examples because its algorithm needs more."
    )


class WeightSyncConfig(Section):
    """How weights move from the trainer to the generator."""

    backend: str = Field("auto", description="A transport by name, or auto: the fastest that fits.")
    options: dict[str, Any] = Field(default_factory=dict)
    export: Literal["auto", "full_tensors", "boxes"] = Field(
        "auto",
        description="full_tensors: trainer ranks gather each tensor. boxes: each rank sends the parts it holds. auto: "
        "boxes where tensor, pipeline or expert parallel ranks hold parts; else the transport's first choice.",
    )
    payload: Literal["full", "adapter"] = Field(
        "full", description="full: the model, adapters merged in. adapter: only the LoRA adapters."
    )
    fleet_rule: Literal["barrier", "rolling"] = Field(
        "barrier", description="barrier: all replicas change together. rolling: a few at a time while others serve."
    )
    max_loading: Positive = Field(1, description="Under rolling: replicas that change their weights at a time.")
    bucket_mb: Annotated[int, Field(ge=1, le=1 << 20)] = Field(256, description="Memory beyond the weights, MiB.")
    timeout_s: Seconds = 600.0


class RuntimeConfig(Section):
    """The runtime, which builds the roles and forwards calls to them."""

    backend: str = "local"
    options: dict[str, Any] = Field(default_factory=dict)


class MemoryConfig(Section):
    """Handling of memory for roles that share devices."""

    offload: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Move weights, optimizer and KV cache out of device memory while another role works. auto: on GPUs "
        "that roles share; always: also on shared CPUs; never: everything stays.",
    )


class TrainConfig(Section):
    """Length of training, and how a step's samples become optimizer updates."""

    steps: Positive
    prompts_per_step: Positive = Field(description="Prompts (or demonstrations) drawn per step.")
    mini_batches: Positive = Field(1, description="Optimizer updates per pass over a step's samples.")
    epochs: Positive = Field(1, description="Passes over a step's samples.")
    step_policies: list[PluginChoice] = Field(
        default_factory=list, description="Step policies, which may stop the run or change its sampling after a step."
    )


class EvalSetConfig(Section):
    """An evaluation set: eval datasets with a reward, sampling and measures of their own."""

    datasets: list[str] = Field(min_length=1, description="Names of data.eval: name, or the stem of path.")
    reward: str | None = Field(None, description="A separate reward role; by default the flow's.")
    sampling: SamplingConfig | None = Field(None, description="By default that of eval.")
    samples_per_prompt: Copies | None = Field(None, description="By default that of eval.")
    k: list[Positive] | None = Field(None, description="By default that of eval.")
    pass_threshold: FiniteFloat | None = Field(None, description="By default that of eval.")


class EvalConfig(Section):
    """Evaluation on the eval datasets."""

    every: NonNegative = Field(0, description="Steps between evaluations; 0: only before and after training.")
    at_start: bool = True
    at_end: bool = True
    sampling: SamplingConfig | None = Field(None, description="By default greedy, with the rollout's length.")
    samples_per_prompt: Copies = 1
    k: list[Positive] | None = Field(
        None,
        description="The k of pass@k, maj@k and best@k; by default the powers of two up to samples_per_prompt, and it.",
    )
    pass_threshold: FiniteFloat | None = Field(
        None,
        description="Accuracy from which a sample passes, 1 by default; reward where rewards give no accuracy.",
    )
    confidence: float = Field(0.95, gt=0, lt=1, description="Confidence of the bootstrap intervals.")
    resamples: NonNegative = Field(1000, description="Bootstrap resamples of the intervals; 0: no intervals.")
    sets: dict[str, EvalSetConfig] = Field(
        default_factory=dict, description="Evaluation sets by name; datasets in none follow the keys above."
    )


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    every: NonNegative = Field(10, description="Steps between checkpoints; 0: only at the end.")
    keep_last: Positive = 2
    keep_best: NonNegative = Field(0, description="In addition to the last, keep this many with the best metric.")
    background: bool = Field(False, description="Train on while trainers that can do so write their copies to disk.")
    metric: str = Field("eval/accuracy", description="Metric of the step that ranks checkpoints; higher is better.")
    export: bool = Field(True, description="Write a Hugging Face model directory when training ends.")


class LogConfig(Section):
    """Output written and shown during the run."""

    loggers: list[PluginChoice] = Field(default_factory=list)
    rollouts: NonNegative = Field(64, description="Samples per step written to rollouts/ for the report; 0: none.")
    progress: bool = True


class RunConfig(Section):
    """The complete configuration of a run."""

    name: str = "run"
    output_dir: str = Field("runs/${name}", description="Run directory.")
    seed: NonNegative = 0
    model: ModelConfig
    data: DataConfig
    algorithm: PluginChoice
    roles: dict[str, RoleConfig]
    sampling: SamplingConfig = SamplingConfig()
    schedules: list[ScheduleChoice] = Field(default_factory=list, description="Settings that change over the steps.")
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    memory: MemoryConfig = MemoryConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
