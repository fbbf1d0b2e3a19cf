"""The files that one prompt passes through, from the sampler that draws it to the weight sync after its update.

Makes one GRPO step on the local runtime with real backends (trainer ``fsdp``, generator ``transformers``, reward
``gsm8k``) and watches every call in every thread with ``sys.setprofile``, from the sampler's ``next_batch`` to the
first ``sync_weights`` after it. A function gets the prompt's data if one of its arguments holds

- a record of ``chatlearn_core.types`` whose id is the prompt's or begins with it (a prompt, request, sample, group), or
  a batch with such an id;
- the prompt's text, or an integer array, tensor or list that contains the prompt's tokens in order.

Containers and dataclasses are searched; ``self`` is not, because an object that holds samples would count with every
method. The files of these functions are of two kinds:

- ``path``: the data goes on from here. The file returns it, or gives it to another file on the path.
- ``readers``: they look at the data and answer with something else: a check, a number, logits, a reward.

``records`` are listed apart, because they say what the data is, not what happens to it: ``chatlearn_core.types``,
``chatlearn_core.protocols`` and two modules of dataclasses (``RECORDS``). A reward's worker processes are not watched.
Prints one JSON line last.

    python benchmarks/prompt_path.py [--functions]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from grpo_steps import grpo_steps
from machine import machine_facts
from workload import Workload

AIM = 25
"""Files that somebody reads to follow a prompt through a step."""
WORKLOAD = Workload("path", hidden=32, layers=2, prompts=4, group_size=4, completion_tokens=8)
RECORDS = (
    "chatlearn_core.types",
    "chatlearn_core.protocols",
    "chatlearn_core.executor.step_samples",
    "chatlearn_generator_kit.pending_request",
)
INNER = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
"""Functions whose results stay in the function around them."""
FIRST, LAST = "next_batch", "sync_weights"
MAX_DEPTH = 8


class MarkedPrompt:
    """Recognises the data of one prompt.

    Args:
        prompt_id: its id, with which the ids of its groups and samples begin.
        text: the prompt's text.
    """

    def __init__(self, prompt_id: str, text: str) -> None:
        self.id = prompt_id
        self.text = text
        self.tokens: np.ndarray[Any, np.dtype[np.int64]] | None = None
        """[P] known once the prompt's record has been seen."""

    def is_in(self, value: Any, depth: int = 0) -> bool:
        """Whether the value holds the prompt's data."""
        if value is None or isinstance(value, bool | int | float | bytes) or depth > MAX_DEPTH:
            return False
        if isinstance(value, str):
            return self.text in value
        if isinstance(value, np.ndarray):
            return self._is_among(value)
        if isinstance(value, torch.Tensor):
            integers = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
            return integers and value.device.type == "cpu" and self._is_among(value.detach().numpy())
        if isinstance(value, Mapping):
            return any(self.is_in(item, depth + 1) for item in list(value.values()))
        if isinstance(value, list | tuple | set | frozenset):
            if value and all(type(item) is int for item in value):
                return self._is_among(np.array(list(value)))
            return any(self.is_in(item, depth + 1) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._is_record(value) or any(self.is_in(item, depth + 1) for item in _fields(value))
        return False

    def _is_record(self, value: Any) -> bool:
        """Whether a record of the core's types has the prompt's id."""
        if not type(value).__module__.startswith(RECORDS[0]):
            return False
        if type(value).__name__ == "Prompt" and value.id == self.id:
            self.tokens = np.asarray(value.token_ids, np.int64)
        ids = [getattr(value, "id", None), *getattr(value, "sample_ids", ())]
        return any(isinstance(one, str) and one.startswith(self.id) for one in ids)

    def _is_among(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether the array, read in order, contains the prompt's tokens."""
        if self.tokens is None or array.dtype.kind not in "iu" or array.size < len(self.tokens):
            return False
        values, wanted = array.astype(np.int64).ravel(), self.tokens
        starts = np.flatnonzero(values[: len(values) - len(wanted) + 1] == wanted[0])
        return any(np.array_equal(values[start : start + len(wanted)], wanted) for start in starts)


def _fields(value: Any) -> Iterator[Any]:
    """The values of a dataclass's fields that are set."""
    for field in dataclasses.fields(value):
        try:
            yield getattr(value, field.name)
        except AttributeError:
            continue


class Watch:
    """Notes the functions that handle a prompt, in the order in which they first do. Used as a profile function."""

    def __init__(self, prompt: MarkedPrompt) -> None:
        self.prompt = prompt
        self.functions: dict[str, list[str]] = {}
        """Module -> names of the functions that get or return the data."""
        self.returning: set[str] = set()
        """Modules with a function that returns the data."""
        self.given: set[tuple[str, str]] = set()
        """(module, module that it gives the data to)"""
        self.is_on = False
        self.has_ended = False

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        module = _module(frame) if event in ("call", "return") and not self.has_ended else ""
        if not module:
            return
        name = frame.f_code.co_name
        if not self.is_on:
            self.is_on = name == FIRST
        elif name == LAST:
            self.has_ended = True
        elif event == "call" and self.prompt.is_in(_arguments(frame)):
            self._note(module, frame)
            giver = frame.f_back
            while giver is not None and not _module(giver):
                giver = giver.f_back
            if giver is not None:
                self.given.add((_module(giver), module))
        elif event == "return" and name not in INNER and self.prompt.is_in(result):
            self._note(module, frame)
            self.returning.add(module)

    def _note(self, module: str, frame: FrameType) -> None:
        names = self.functions.setdefault(module, [])
        if frame.f_code.co_qualname not in names:
            names.append(frame.f_code.co_qualname)

    @property
    def records(self) -> list[str]:
        """Modules that say what the data is."""
        return [module for module in self.functions if module.startswith(RECORDS)]

    @property
    def path(self) -> list[str]:
        """Modules that return the data, or give it to a module on the path."""
        others = [module for module in self.functions if not module.startswith(RECORDS)]
        found = self.returning.intersection(others)
        while more := {giver for giver, taker in self.given if taker in found} - found:
            found |= more
        return [module for module in others if module in found]

    @property
    def readers(self) -> list[str]:
        """The other modules."""
        known = {*self.records, *self.path}
        return [module for module in self.functions if module not in known]


def _module(frame: FrameType) -> str:
    """The name of ChatLearn's module that a frame is in; empty for others."""
    module = str(frame.f_globals.get("__name__", ""))
    return module if module.startswith("chatlearn_") and not frame.f_code.co_filename.startswith("<") else ""


def _arguments(frame: FrameType) -> list[Any]:
    """The arguments of a call, without ``self``."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    names = code.co_varnames[:count]
    return [frame.f_locals[name] for name in names if name not in ("self", "cls") and name in frame.f_locals]


def measure() -> Watch:
    """Make the step, and watch it."""
    with tempfile.TemporaryDirectory() as directory:
        made = WORKLOAD.prepare(Path(directory), 1)
        row = json.loads(made.data.read_text(encoding="utf-8").splitlines()[0])
        watch = Watch(MarkedPrompt(row["id"], row["prompt"]))
        settings = made.settings() | {"recompute_old_logprobs": True}
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            grpo_steps(str(made.model), str(made.data), f"{directory}/run", settings)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # typeshed forgets that None ends it
    assert watch.prompt.tokens is not None, f"{FIRST} did not draw prompt {row['id']!r}"
    assert watch.has_ended, f"no {LAST} came after {FIRST}"
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="print the functions of every file, too")
    arguments = parser.parse_args()
    watch = measure()
    listed = {"path": watch.path, "readers": watch.readers, "records": watch.records}
    for kind, modules in listed.items():
        print(f"{kind}: {len(modules)}")
        for module in modules:
            print(f"    {_file(module)}")
            if arguments.functions:
                print(*(f"        {name}" for name in watch.functions[module]), sep="\n")
    print(
        json.dumps(
            {
                "benchmark": "prompt_path",
                "files_on_path": len(watch.path),
                "files_in_all": len(watch.functions),
                "aim": AIM,
                "met": len(watch.path) <= AIM,
                "path_by_package": Counter(module.partition(".")[0] for module in watch.path),
                "all_by_package": Counter(module.partition(".")[0] for module in watch.functions),
                **{kind: [_file(module) for module in modules] for kind, modules in listed.items()},
                "machine": machine_facts(),
            }
        )
    )


def _file(module: str) -> str:
    return module.replace(".", "/") + ".py"


if __name__ == "__main__":
    main()
