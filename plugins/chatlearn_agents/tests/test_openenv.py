"""A server and a client of the library OpenEnv, which the environment ``game`` plays through WebSockets."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

from chatlearn_agents.game_environment import GameEnvironment
from chatlearn_agents.options import GameOptions
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import Prompt

pytestmark = pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # its own, of websockets
CLIENT = """
from openenv.core import EnvClient
from openenv.core.client_types import StepResult

class Guesses(EnvClient):
    def _step_payload(self, action):
        return {"number": action}

    def _parse_result(self, payload):
        return StepResult(payload["observation"]["hint"], payload["reward"], payload["done"])

    def _parse_state(self, payload):
        return payload

def make(url):
    return Guesses(base_url=url)
"""


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Guessing(Environment[Guess, Hint, State]):
    """Guess a number, which the seed determines."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.goal = (seed or 0) % 10
        return Hint(hint="guess from 0 to 9")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:  # type: ignore[override]
        if action.number == self.goal:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.goal else "lower", reward=-0.25)

    @property
    def state(self) -> State:
        return State()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "some_client.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = create_app(Guessing, Guess, Hint, max_concurrent_envs=4)
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not running.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(10)
    listener.close()
    sys.modules.pop("some_client", None)


async def test_a_server_of_openenv_is_played(server: str, plays: Any, tokenizer: Any) -> None:
    options = {"api": "openenv", "make": "some_client:make", "arguments": {"url": server}, "action": "number"}
    environment = GameEnvironment(GameOptions(**options), RoleContext("game"))
    environment.setup()
    messages = ({"role": "user", "content": "Guess."},)
    prompt = Prompt("p", np.array([5], np.int64), "?", messages=messages, columns={"seed": 24})
    played = await plays(environment, tokenizer, ["5", "is it 3?", "4"], prompt=prompt)
    assert played.rollout.reward.value == 1.0 - 2 * 0.25
    said = played.text.replace("<|im_end|>\n<|im_start|>", "|").replace("\n", " ")
    turns = "Guess.  guess from 0 to 9|assistant 5|user lower|assistant is it 3?|user higher|assistant 4<|im_end|>"
    assert said.endswith(turns)
    assert played.count("ended") == 1
