"""A gateway before a generator that writes what the test tells it, token by token as its tokenizer encodes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_chat.turn_reader import TurnReader
from chatlearn_core.protocols import RolloutContext, RolloutOrder
from chatlearn_core.types import Prompt, SamplingParams
from chatlearn_gateway.server import Gateway
from chatlearn_gateway.session import Session
from chatlearn_hf.tiny import TOOLS_TEMPLATE, build_tiny_tokenizer
from chatlearn_testing.fakes.scripted import Scripted


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    return tokenizer


@pytest.fixture
def scripted(tokenizer: Any) -> Callable[..., Scripted]:
    """``scripted(*texts)``: a generator that writes these texts."""
    return lambda *texts, **settings: Scripted(tokenizer, list(texts), **settings)


@dataclass
class Served:
    """A session behind a server."""

    gateway: Gateway
    generator: Scripted
    session: Session
    key: str

    @property
    def url(self) -> str:
        return self.gateway.url


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    gateway.start()
    yield gateway
    gateway.close()
    assert not any(thread.name == "gateway" for thread in threading.enumerate())


@pytest.fixture
def serve(gateway: Gateway, tokenizer: Any, scripted: Any) -> Iterator[Callable[..., Served]]:
    """``serve(*texts, max_tokens=, max_turns=, turn_tokens=)``: a session whose generator writes these texts."""
    made: list[Served] = []

    def make(
        *texts: str,
        max_tokens: int = 1000,
        max_turns: int | None = None,
        turn_tokens: int = 500,
        overrides: bool = False,
        **settings: Any,
    ) -> Served:
        generator = scripted(*texts, **settings)
        prompt = Prompt("p", np.array([5, 6], np.int64), "what is 1 + 1?")
        order = RolloutOrder("p@0#0", "p@0", prompt, SamplingParams(turn_tokens), 7, max_tokens, 60.0, max_turns)
        session = Session(
            RolloutContext(order, tokenizer, generator),
            TurnReader(ChatTemplateRenderer(tokenizer)),
            overrides_sampling=overrides,
        )
        served = Served(gateway, generator, session, gateway.open(session))
        made.append(served)
        return served

    yield make
    for one in made:
        gateway.end(one.key)
