"""One small run in which a process is killed. Imported by tests, and a program of its own where the driver dies.

    python fault_run.py SITE FOLDER CONFIG TARGET PHASE

``TARGET`` ``none`` kills no process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

STEPS = 3
FAULT_STEP = 2
"""Phases that come in every step are disturbed in this one: a checkpoint is behind it, and another before it."""
FROZEN = "frozen-"
KILLED = ("generator", "reward", "trainer", "environment", "node", "driver")
TARGETS = (*KILLED, *(FROZEN + target for target in KILLED if target != "driver"))
"""Who is killed, or stopped and never goes on by itself."""
SECONDS_PER_TOKEN = 0.05
"""Of the modes that sample ahead."""
HEARTBEAT_S = 3.0
"""For runs in which a process is stopped."""


@dataclass(slots=True, frozen=True)
class Trap:
    """The place of a kill."""

    call: str
    """The backend's call that shows the phase from within."""
    by: str
    """The kind of process that is in it."""
    step: int | None = FAULT_STEP
    """The step in which the phase is disturbed; None for a phase that comes once."""


TRAPS: dict[str, Trap] = {
    "starting": Trap("setup", "any", None),
    "restoring": Trap("load", "trainer", None),
    "generating": Trap("generate", "generator"),
    "scoring": Trap("score", "reward"),
    "computing": Trap("compute", "trainer"),
    "updating": Trap("update", "trainer"),
    "syncing": Trap("send", "trainer"),
    "evaluating": Trap("generate", "generator"),
    "saving": Trap("save", "trainer"),
    "exporting": Trap("export", "trainer", None),
    "recovering": Trap("setup", "trainer", None),
    "closing": Trap("close", "any", None),
}
"""By phase. A test holds its keys and the executor's enumeration together."""

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off": {"mode": "one_step_off"},
    "async": {"mode": "async", "max_staleness": 1, "options": {"during_sync": "abort"}},
}
"""Section ``rollout`` of the runs. In the modes that sample ahead, completions outlast the updates of a step."""
MOMENTS: dict[str, tuple[str, Trap]] = {
    "ahead": ("updating", Trap("token", "generator")),
    "draining": ("syncing", Trap("token", "generator")),
    "interrupting": ("syncing", Trap("abort", "generator")),
    "resuming": ("syncing", Trap("resumed", "generator")),
}
"""Moments of the modes that sample ahead, beside the phases: the phase in which one begins, and its trap."""
OWN_CALLS = {"trainer": "update", "reward": "score", "environment": "rollout"}
"""The call in which a target dies while rollouts are made ahead."""


def phase_of(phase: str) -> str:
    """The phase in which a phase, or a moment, begins."""
    return MOMENTS[phase][0] if phase in MOMENTS else phase


def trap_for(target: str, phase: str) -> Trap:
    """The trap of one cell: a worker dies in its own call where the phase has one for its kind."""
    if phase in MOMENTS:
        trap = MOMENTS[phase][1]
        return Trap(OWN_CALLS[target], target) if phase == "ahead" and target in OWN_CALLS else trap
    trap, kind = TRAPS[phase], target.removeprefix(FROZEN)
    if phase == "syncing" and kind == "generator":
        return Trap("receive", "generator", trap.step)
    if kind == "environment" and trap.call == "generate":
        return Trap("rollout", "environment", trap.step)
    if trap.by == "any" and kind in ("generator", "reward", "trainer", "environment"):
        return Trap(trap.call, kind, trap.step)
    return trap


def needs_environment(target: str) -> bool:
    """Whether the rollouts of this target's runs are made by an environment."""
    return target.removeprefix(FROZEN) == "environment"


@dataclass
class Watch:
    """Sets the trap when the phase begins, and keeps what is told."""

    folder: Any
    target: str
    phase_name: str
    phases: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    is_set: bool = False
    is_lost: bool = False

    def listener(self) -> Any:
        """A listener that does this."""
        from chatlearn_core.executor.progress import RunListener

        watch = self

        class Listener(RunListener):
            def phase(self, step: int, phase: Any) -> None:
                watch.enter(step, str(phase))

            def message(self, text: str) -> None:
                watch.said.append(text)

            def warning(self, text: str) -> None:
                watch.said.append(text)

        return Listener()

    def enter(self, step: int, phase: str) -> None:
        self.phases.append(phase)
        if self.target == "none":
            return
        if self.phase_name == "recovering" and not self.is_lost and (step, phase) == (FAULT_STEP, "updating"):
            self.is_lost = True  # no recovery starts before a rank is lost
            self.folder.arm("update", "trainer", "trainer")
        trap = trap_for(self.target, self.phase_name)
        if not self.is_set and phase == phase_of(self.phase_name) and trap.step in (None, step):
            self.is_set = True
            self.folder.arm(trap.call, trap.by, self.target)


def write_config(directory: Path, model: Path, faults: Path, *, environment: bool = False, mode: str = "sync") -> Path:
    """The configuration of a run over light backends; returns its path.

    Args:
        environment: whether an environment makes the rollouts.
        mode: a key of ``MODES``.
    """
    rows = [{"id": f"p{i}", "prompt": f"How much is {i} plus {i + 3}? ", "ground_truth": "7"} for i in range(4 * STEPS)]
    prompts = model.parent / "prompts.jsonl"  # the same for all: a run that goes on must have the same data
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held: dict[str, Any] = {"device": "cpu", "timeout_s": 60.0}
    dataset = {"path": str(prompts), "format": "prompt"}
    config: dict[str, Any] = {
        "name": "faults",
        "output_dir": str(directory / "run"),
        "model": {"path": str(model)},
        "data": {"train": [dataset], "eval": [{**dataset, "limit": 3}], "apply_chat_template": False},
        "algorithm": {"name": "grpo", "options": {"group_size": 4}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "trapped", "ranks": 2, **held},
            "generator": {"kind": "generator", "backend": "trapped", "replicas": 2, **held},
            "reward": {"kind": "reward", "backend": "trapped", "replicas": 2, "timeout_s": 60.0},
        },
        "weight_sync": {"backend": "trapped", "timeout_s": 30.0},
        "sampling": {"max_tokens": 12},
        "train": {"steps": STEPS, "prompts_per_step": 4, "mini_batches": 2},
        "eval": {"every": 1},
        "checkpoint": {"every": 1, "keep_last": 10},
        "log": {"progress": False},
        "runtime": {
            "backend": "ray",
            "options": {
                "environment": {"CHATLEARN_FAULTS": str(faults), "OMP_NUM_THREADS": "1"},
                "num_threads": 1,
                "max_generator_restarts": 3,
                "max_reward_restarts": 3,
                "max_environment_restarts": 3,
                "max_trainer_restarts": 3,
            },
        },
    }
    if mode != "sync":
        config["rollout"] = MODES[mode]
        config["algorithm"]["options"]["importance_correction"] = "truncate"
        config["roles"]["generator"]["options"] = {"seconds_per_token": SECONDS_PER_TOKEN}
    if environment:
        made = {"kind": "environment", "backend": "trapped", "uses": {"policy": "generator"}, "replicas": 2}
        config["roles"]["desk"] = {**made, "timeout_s": 60.0}
        config["algorithm"]["options"]["roles"] = {"environment": "desk"}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def make_run(config: Path, overrides: list[str], watch: Watch, resume: Any = "auto") -> Mapping[str, Any]:
    """Train to the end; returns the summary."""
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.run import Run
    from chatlearn_core.plugins.loader import discover_plugins

    registry = discover_plugins()
    run = Run(assemble(load_config(config, overrides, registry), registry), listener=watch.listener())
    return await run.train(resume)


def main(site: str, folder: str, config: str, target: str, phase: str, *overrides: str) -> None:
    """The program."""
    sys.path.append(site)
    import chatlearn_ray_fault_backends as backends

    faults = backends.Folder(Path(folder))
    faults.enrol("driver", 0)
    os.environ["CHATLEARN_FAULTS"] = folder
    resume: list[str] = [text.removeprefix("--resume=") for text in overrides if text.startswith("--resume=")]
    settings = [text for text in overrides if not text.startswith("--resume=")]
    watch = Watch(faults, target, phase)
    asyncio.run(make_run(Path(config), settings, watch, Path(resume[0]) if resume else "auto"))


if __name__ == "__main__":
    main(*sys.argv[1:])
