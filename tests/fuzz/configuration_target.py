"""What becomes of a configuration, in a process of its own: refused with a sentence, or run for a step."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from chatlearn_chat import renderer
from chatlearn_core.config.load import LoadedConfig, load_config
from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.executor.assembly import assemble, assemble_flow
from chatlearn_core.executor.planning import run_directory
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins

torch.set_num_threads(1)
REGISTRY = discover_plugins()
WORK: dict[tuple[str, ...], int] = {
    ("train", "steps"): 1,
    ("train", "prompts_per_step"): 2,
    ("train", "mini_batches"): 2,
    ("train", "epochs"): 2,
    ("algorithm", "options", "group_size"): 2,
    ("rollout", "in_flight_prompts"): 4,
    ("eval", "samples_per_prompt"): 2,
    ("roles", "generator", "replicas"): 2,
    ("roles", "trainer", "options", "lora", "rank"): 64,
}
"""Settings that only say how much work there is, and how much of it is done here."""


def check(case: dict[str, Any]) -> dict[str, str]:
    """``end`` is ``refused``, ``assembled`` or ``completed``; ``by`` what refused it, ``text`` its sentence.

    Args:
        case: ``text`` of the configuration, ``overrides``, whether to ``run`` what is valid, and perhaps
            ``template_timeout_s``.
    """
    renderer.TEMPLATE_TIMEOUT_S = case.get("template_timeout_s", renderer.TEMPLATE_TIMEOUT_S)
    folder = tempfile.mkdtemp(dir=Path.cwd())
    os.chdir(folder)
    os.environ["HOME"] = folder
    try:
        loaded = load_config(case["text"], case["overrides"], REGISTRY)
        assemble_flow(loaded, REGISTRY)
    except ChatLearnError as error:
        return {"end": "refused", "by": "validation", "text": f"{type(error).__name__}: {error}"}
    try:
        overrides = [*case["overrides"], *less_work(loaded)]
        run_dir = run_directory(loaded.config).resolve()
        if not any(run_dir.is_relative_to(place) for place in (folder, "/dev/null", "/proc")):
            overrides.append("output_dir=run")  # not into the developer's files
        loaded = load_config(case["text"], overrides, REGISTRY)
        assembly = assemble(loaded, REGISTRY)
        if not case["run"]:
            return {"end": "assembled", "by": "", "text": ""}
        asyncio.run(Run(assembly).train("never"))
    except ChatLearnError as error:
        return {"end": "refused", "by": "the run", "text": f"{type(error).__name__}: {error}"}
    return {"end": "completed", "by": "", "text": ""}


def train(text: str) -> None:
    """Run a configuration to its end."""
    asyncio.run(Run(assemble(load_config(text, (), REGISTRY), REGISTRY)).train("never"))


def less_work(loaded: LoadedConfig) -> list[str]:
    """Overrides that leave the shape of a run and take most of its work away."""
    overrides = []
    for path, most in WORK.items():
        value: Any = loaded.config
        for part in path:
            if part == "options":
                choice = loaded.chosen(*path[: path.index("options")])
                value = choice.options if choice is not None else None
            else:
                value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if isinstance(value, int) and value > most:
            overrides.append(f"{'.'.join(path)}={most}")
    if loaded.config.sampling.max_tokens > 8 and loaded.config.rollout.partial == "none":
        overrides.append("sampling.max_tokens=8")
    if loaded.config.eval.sampling is not None and loaded.config.eval.sampling.max_tokens > 8:
        overrides.append("eval.sampling.max_tokens=8")
    return overrides
