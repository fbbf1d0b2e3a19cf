"""A policy that writes what the test tells it, token by token, and environments before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_agents.options import ToolsOptions
from chatlearn_agents.tool_environment import ToolEnvironment
from chatlearn_core.protocols import RoleContext, RolloutContext, RolloutOrder
from chatlearn_core.types import Prompt, Rollout, SamplingParams
from chatlearn_hf.tiny import TOOLS_TEMPLATE, build_tiny_tokenizer
from chatlearn_testing.fakes.scripted import Scripted

TOOLS = '''
import time
from chatlearn_core.protocols import ToolError

CALLS = []

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    CALLS.append((a, b))
    return a + b

async def greet(name: str) -> dict:
    """Greets."""
    return {"greeting": f"hello {name}"}

def huge() -> str:
    """Ten megabytes."""
    return "x" * 10_000_000

def hangs() -> str:
    time.sleep(3)
    return "late"

def raises(times: int = 9) -> str:
    CALLS.append(times)
    if len(CALLS) <= times:
        raise LookupError("a fuse blew")
    return "repaired"

def exits() -> str:
    raise SystemExit(3)

def refuses() -> str:
    CALLS.append("refuses")
    raise ToolError("no such city")

def lies() -> int:
    return "seven"

def unprintable():
    return object()

def positional(a, /):
    return a

SCHEMA = {"type": "object"}
'''


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    return tokenizer


@pytest.fixture
def some_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module ``some_tools``, imported anew."""
    import importlib
    import sys

    (tmp_path / "some_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("some_tools", None)
    yield importlib.import_module("some_tools")
    sys.modules.pop("some_tools", None)


@dataclass
class Played:
    """A rollout and what made it."""

    rollout: Rollout
    generator: Scripted
    tokenizer: Any

    @property
    def sample(self) -> Any:
        return self.rollout.samples[0]

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.sample.token_ids, skip_special_tokens=False)

    @property
    def sampled_text(self) -> str:
        return self.tokenizer.decode(self.sample.token_ids[self.sample.loss_mask], skip_special_tokens=False)

    def count(self, name: str) -> float:
        return self.sample.sequence_data[f"environment/{name}"]


QUESTION = ({"role": "user", "content": "what is 1 + 1?"},)


def prompt_of(tokenizer: Any, messages: Any = QUESTION, **fields: Any) -> Prompt:
    text = tokenizer.apply_chat_template(list(QUESTION), tokenize=False, add_generation_prompt=True)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)
    return Prompt("p", ids, text, messages=messages, **fields)


async def play(
    environment: Any,
    tokenizer: Any,
    texts: Any,
    *,
    max_tokens: int = 4000,
    max_turns: int | None = None,
    turn_tokens: int = 500,
    prompt: Prompt | None = None,
    ends: tuple[str, ...] = (),
) -> Played:
    generator = Scripted(tokenizer, list(texts), ends=ends)
    prompt = prompt or prompt_of(tokenizer, ground_truth="2")
    order = RolloutOrder("p@0#0", "p@0", prompt, SamplingParams(turn_tokens), 7, max_tokens, 60.0, max_turns)
    rollout = await environment.rollout(prompt, RolloutContext(order, tokenizer, generator))
    return Played(rollout, generator, tokenizer)


@pytest.fixture
def plays() -> Callable[..., Any]:
    """``await plays(environment, tokenizer, texts, ...)``."""
    return play


@pytest.fixture
def plain_prompt(tokenizer: Any) -> Prompt:
    """Of a row with a plain text."""
    return prompt_of(tokenizer, messages=())


@pytest.fixture
def with_tools(tokenizer: Any) -> Iterator[Callable[..., Any]]:
    """``await with_tools(options, *texts, max_tokens=, max_turns=, turn_tokens=, prompt=)``."""
    made: list[ToolEnvironment] = []

    async def run(options: dict[str, Any], *texts: str, **limits: Any) -> Played:
        environment = ToolEnvironment(ToolsOptions(**options), RoleContext("tools"))
        made.append(environment)
        environment.setup()
        return await play(environment, tokenizer, texts, **limits)

    yield run
    for one in made:
        one.close()
        one.close()
