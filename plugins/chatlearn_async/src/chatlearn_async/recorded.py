"""Rollouts in a directory: how they are stored, and whether a run can train on them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.exceptions import CheckpointError, ConfigError, ModelError
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from chatlearn_core.executor.output_cache import WEIGHTS
from chatlearn_core.executor.stages import step_stages
from chatlearn_core.flow import Graph, Node
from chatlearn_core.metrics.durable_files import sha256_of

FOLDER = "recorded"
"""Directory of a run's recorded rollouts: a sealed directory ``step_N`` for each step, as checkpoints are."""
FACTS, GROUPS, SAMPLES, EXAMPLES = "recorded", "groups", "samples", "examples"
"""Keys of a step's seal: ``RecordedFacts``, numbers of groups and samples, ids of the examples."""
KEY = "rollout.options.directory"
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
"""How names of a tokenizer's files begin."""


@dataclass(slots=True, frozen=True)
class RecordedFacts:
    """What must be the same where rollouts are recorded and where they are trained on."""

    tokenizer: str
    """Checksum of its files; of a model that is no local directory, its name."""
    model: str
    """The same for weights and configuration."""
    group_size: int
    flow: tuple[str, ...]
    """The calls that made the rollouts."""

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "tokenizer": self.tokenizer,
            "model": self.model,
            "group_size": self.group_size,
            "flow": list(self.flow),
        }


def store_in(directory: Path) -> CheckpointStore:
    """The recorded steps of a run's directory. All are kept."""
    return CheckpointStore(directory / FOLDER, keep_last=2**31, keep_best=0)


def production_nodes(assembly: Assembly) -> tuple[Node, ...]:
    """The calls that make rollouts."""
    return step_stages(assembly.graph, (*assembly.learning.learners, *assembly.plan.refreshes))[0]


def facts_of(assembly: Assembly) -> RecordedFacts:
    """The facts about a run.

    Raises:
        ModelError: a file of the model cannot be read.
    """
    model = assembly.config.model
    return RecordedFacts(
        tokenizer=_checksum(model.tokenizer or model.path, is_tokenizer=True),
        model=_checksum(model.path, is_tokenizer=False),
        group_size=assembly.algorithm.group_size,
        flow=tuple(f"{node.role}.{node.method.name}" for node in production_nodes(assembly)),
    )


def check_facts(assembly: Assembly, step: Checkpoint) -> None:
    """Raises ConfigError: the rollouts were recorded with another tokenizer, model, group size or flow; ModelError."""
    here, there = facts_of(assembly), step.state[FACTS]
    config, source = assembly.config, assembly.loaded.source
    tokenizer_key = "model.tokenizer" if config.model.tokenizer else "model.path"
    checks: tuple[tuple[str, str, object, object, str], ...] = (
        (
            "tokenizer",
            tokenizer_key,
            config.model.tokenizer or config.model.path,
            here.tokenizer,
            "with another tokenizer, so their tokens mean something else",
        ),
        (
            "model",
            "model.path",
            config.model.path,
            here.model,
            "by another model, so their logprobs are not this one's",
        ),
        (
            "group_size",
            "algorithm.options.group_size",
            here.group_size,
            here.group_size,
            f"in groups of {there['group_size']}",
        ),
        (
            "flow",
            "algorithm.name",
            config.algorithm.name,
            list(here.flow),
            f"by the calls {', '.join(there['flow'])}, but this algorithm makes them by {', '.join(here.flow)}",
        ),
    )
    for name, key, value, own, how in checks:
        if there[name] != own:
            raise ConfigError(
                f"{source}: {KEY} is {step.path.parent}, whose rollouts were recorded {how} ({key} is {value!r} here; "
                f"the settings of the recording are in {step.path / 'checkpoint.json'}). Restore that setting, or "
                "record rollouts with this configuration: chatlearn run --rollouts-only"
            )


def check_examples(assembly: Assembly, steps: Sequence[Checkpoint]) -> None:
    """Raises ConfigError: the training data lack examples of the recorded rollouts."""
    known = {example.id for example in assembly.train_set}
    wanted = {name for step in steps for name in step.state[EXAMPLES]}
    if missing := sorted(wanted - known):
        raise ConfigError(
            f"{assembly.loaded.source}: {KEY} is {steps[0].path.parent}, which has rollouts of {len(missing)} prompts "
            f"that data.train does not have, such as {', '.join(missing[:3])}. Restore the data of the recording, or "
            "record rollouts with these: chatlearn run --rollouts-only"
        )


def steps_in(directory: str, source: str) -> list[Checkpoint]:
    """The recorded steps, oldest first, without reading their rollouts.

    Args:
        directory: the output directory of ``chatlearn run --rollouts-only``.
        source: of the configuration, for messages.

    Raises:
        ConfigError: there are none.
        CheckpointError: a seal is damaged.
    """
    folder = Path(directory) / FOLDER
    paths = sorted(path for path in folder.glob("step_*") if path.is_dir()) if folder.is_dir() else []
    if not paths:
        what = "has no recorded rollouts" if Path(directory).is_dir() else "does not exist"
        raise ConfigError(
            f"{source}: {KEY} is {directory}, which {what} (directories {FOLDER}/step_*). Name the output_dir of a run "
            "of chatlearn run --rollouts-only"
        )
    steps = [read_checkpoint(path, verify=False) for path in paths]
    for step in steps:
        if FACTS not in step.state:
            raise CheckpointError(f"{step.path} is a checkpoint of a training run and has no recorded rollouts")
    return steps


def check_amount(loaded: LoadedConfig, steps: Sequence[Checkpoint]) -> None:
    """Raises ConfigError: the steps of the run need more groups than were recorded."""
    train, there = loaded.config.train, sum(step.state[GROUPS] for step in steps)
    if (needed := train.steps * train.prompts_per_step) > there:
        fewer = there // train.prompts_per_step
        lower = f"Lower train.steps to {fewer}, or record" if fewer else "Record"
        raise ConfigError(
            f"{loaded.source}: {KEY} is {steps[0].path.parent.parent}, which has {there} groups in {len(steps)} steps, "
            f"but train.steps {train.steps} x train.prompts_per_step {train.prompts_per_step} need {needed}. {lower} "
            "more with chatlearn run --rollouts-only and a larger train.steps"
        )


def generates(graph: Graph) -> bool:
    """Whether a flow samples anything."""
    return any(node.kind in ("generator", "environment") for node in graph.nodes)


def _checksum(path: str, *, is_tokenizer: bool) -> str:
    directory = Path(path)
    if not directory.is_dir():
        return path
    digest = hashlib.sha256()
    try:
        for file in sorted(directory.iterdir()):
            if file.name.startswith(_TOKENIZER_FILES) == is_tokenizer and (is_tokenizer or file.suffix in WEIGHTS):
                digest.update(f"{file.name}\0{sha256_of(file)}\0".encode())
    except OSError as error:
        raise ModelError(f"a file of {directory} cannot be read: {error}") from error
    return digest.hexdigest()
