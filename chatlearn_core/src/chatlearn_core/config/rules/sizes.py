"""Rules about sizes: the capacity of a step, and even division."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec

MAX_SAMPLES = 1 << 20
"""Maximum number of samples in a step, which are all in memory together; the largest published runs have a tenth."""
_DEVICE = re.compile(r"auto|cpu|[a-z]+(:\d{1,4})?")


def a_step_can_be_held(checked: Checked) -> Iterator[Problem]:
    """The samples of a step must fit into memory, and take a bounded time to make."""
    config = checked.config
    algorithm = checked.choices.selected.get("algorithm")
    group_size = getattr(algorithm.options, "group_size", 1) if algorithm is not None else 1
    if not isinstance(group_size, int):
        return
    sizes: list[tuple[KeyPath, Any]] = [(("train", "prompts_per_step"), config.train.prompts_per_step)]
    if config.rollout.in_flight_prompts is not None:
        sizes.append((("rollout", "in_flight_prompts"), config.rollout.in_flight_prompts))
    for path, prompts in sizes:
        related: Related = ((("algorithm", "options", "group_size"), group_size),) if group_size > 1 else ()
        if prompts * group_size > MAX_SAMPLES:
            rule = f"makes {prompts * group_size} samples of one step; at most {MAX_SAMPLES} are held at a time"
            yield Problem(path, rule, prompts, "lower it, and raise train.steps instead", related)


def devices_are_named(checked: Checked) -> Iterator[Problem]:
    """A device must be auto, cpu, or an accelerator by torch's name, and the role's backend must run on it."""
    for name, role in checked.config.roles.items():
        if not _DEVICE.fullmatch(role.device) or role.device == "meta":
            rule = "is no device"
            remedy = "write auto, cpu, cuda or cuda:N (torch's name of another accelerator, if the backend knows it)"
            yield Problem(("roles", name, "device"), rule, role.device, remedy)
            continue
        record = checked.record(f"roles.{name}", TrainerSpec) or checked.record(f"roles.{name}", GeneratorSpec)
        kind = role.device.partition(":")[0]
        if record is not None and kind not in ("auto", *record.devices):
            runs_on = ", ".join(sorted(record.devices))
            rule = f"{record.kind} '{record.name}' does not run on {kind}; it runs on: {runs_on}"
            related: Related = ((("roles", name, "backend"), role.backend),)
            yield Problem(("roles", name, "device"), rule, role.device, "choose one of these, or auto", related)


SIZE_RULES: tuple[Rule, ...] = (a_step_can_be_held, devices_are_named)
