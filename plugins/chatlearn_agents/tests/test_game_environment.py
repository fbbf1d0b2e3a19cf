"""The environment ``game``: real games of Gymnasium, clients in the manner of OpenEnv, and games that misbehave."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from chatlearn_agents.game_environment import GameEnvironment
from chatlearn_agents.options import GameOptions
from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import Prompt

LAKE: dict[str, Any] = {
    "make": "FrozenLake-v1",
    "arguments": {"is_slippery": False, "render_mode": "ansi"},
    "actions": ("left", "down", "right", "up"),
}
GAMES = '''
import time
from types import SimpleNamespace

class Counting:
    """Ends when the number in the action reaches the seed modulo 10; in the manner of OpenEnv."""

    closed = 0

    def reset(self, seed):
        self.goal = seed % 10
        return SimpleNamespace(observation=f"reach {self.goal}", reward=None, done=False)

    def step(self, action):
        done = int(action) >= self.goal
        return SimpleNamespace(observation="higher", reward=1.0 if done else -0.25, done=done)

    def close(self):
        Counting.closed += 1

class Asynchronous:
    async def reset(self):
        return SimpleNamespace(observation={"say": "hello"}, reward=None, done=False)

    async def step(self, action):
        return SimpleNamespace(observation=None, reward=float(action == "HELLO"), done=True)

class Broken(Counting):
    def __init__(self, how):
        self.how = how

    def reset(self, seed):
        if self.how == "raises":
            raise LookupError("no level")
        if self.how == "hangs":
            time.sleep(5)
        return super().reset(seed)

    def step(self, action):
        return SimpleNamespace(observation="", reward=float("nan"), done=True)

class Huge:
    def __init__(self, begins=10_000_000):
        self.begins, self.steps = begins, 0

    def reset(self, seed=None):
        return SimpleNamespace(observation="x" * self.begins, reward=0.0, done=False)

    def step(self, action):
        self.steps += 1
        return SimpleNamespace(observation="x" * 10_000_000, reward=0.0, done=self.steps == 2)

def shout(text):
    if not text.strip():
        raise ValueError("empty")
    return text.strip().upper()

def said(observation):
    return "say " + observation["say"]
'''


@dataclass
class Game:
    """A game's environment, played by a scripted policy."""

    options: dict[str, Any]

    def environment(self) -> GameEnvironment:
        environment = GameEnvironment(GameOptions(**self.options), RoleContext("game"))
        environment.setup()
        return environment


@pytest.fixture(autouse=True)
def some_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_games.py").write_text(GAMES)
    monkeypatch.syspath_prepend(str(tmp_path))


async def test_a_game_of_gymnasium_is_played_to_its_end(plays: Any, tokenizer: Any) -> None:
    pytest.importorskip("gymnasium")
    moves = ["I go down", "Not left: down", "jump", "right", "right.", "DOWN", "right"]
    played = await plays(Game(LAKE).environment(), tokenizer, moves)
    first = "what is 1 + 1?\n\n\x1b[41mS\x1b[0mFFF\nFHFH\nFFFH\nHFFG<|im_end|>"
    assert played.text.startswith(f"<|im_start|>user\n{first}"), "the prompt, and the first observation"
    assert "jump<|im_end|>\n<|im_start|>user\nThat is no action. Try again.<|im_end|>" in played.text
    assert played.text.endswith("right<|im_end|>"), "nothing follows the end of the game"
    assert played.rollout.reward.value == 1.0
    counted = {name: played.count(name) for name in ("turns", "invalid_actions", "ended", "truncated")}
    assert counted == {"turns": 7, "invalid_actions": 1, "ended": 1, "truncated": 0}
    for request, turn in zip(played.generator.asked, played.sample.turns, strict=True):
        assert request.prompt_ids.tolist() == played.sample.token_ids[: turn.start].tolist()


async def test_limits_of_the_game_and_of_turns_truncate(plays: Any, tokenizer: Any) -> None:
    pytest.importorskip("gymnasium")
    numbers = {**LAKE, "actions": (), "arguments": {**LAKE["arguments"], "max_episode_steps": 2}}
    played = await plays(Game(numbers).environment(), tokenizer, ["0", "9", "action 0", "never asked"])
    assert (played.rollout.status, played.count("ended"), played.count("invalid_actions")) == ("truncated", 1, 1)
    played = await plays(Game({**LAKE, "max_steps": 3}).environment(), tokenizer, ["left"] * 4)
    assert (played.rollout.status, played.count("turns"), played.count("ended")) == ("truncated", 3, 0)
    played = await plays(Game(LAKE).environment(), tokenizer, ["left"] * 4, max_turns=2)
    assert (played.rollout.status, played.count("turns")) == ("truncated", 2)
    played = await plays(Game(LAKE).environment(), tokenizer, ["left"] * 9, max_tokens=120)
    assert (played.rollout.status, len(played.sample.token_ids) <= 120) == ("truncated", True)


async def test_clients_in_the_manner_of_openenv(plays: Any, tokenizer: Any, plain_prompt: Prompt) -> None:
    import some_games  # type: ignore[import-not-found]  # written by the fixture

    prompt = replace(plain_prompt, messages=({"role": "user", "content": "Count."},), columns={"seed": 23})
    counting = {"api": "openenv", "make": "some_games:Counting", "action": "number", "invalid_reward": -1.0}
    played = await plays(Game(counting).environment(), tokenizer, ["1", "two", "3"], prompt=prompt)
    assert "Count.\n\nreach 3<|im_end|>" in played.text
    assert played.rollout.reward.value == -0.25 - 1.0 + 1.0
    each = Game({**counting, "rewards": "turns"}).environment()
    by_turn = await plays(each, tokenizer, ["1", "two", "3"], prompt=prompt)
    reward, turns = by_turn.sample.reward, by_turn.sample.turns
    assert (reward.value, reward.components) == (0.0, {"return": -0.25})
    assert (reward.step_ends + by_turn.sample.num_prompt_tokens).tolist() == [turn.stop - 1 for turn in turns]
    assert reward.token_values[reward.step_ends].tolist() == [-0.25, -1.0, 1.0]
    assert by_turn.sample.token_ids.tolist() == played.sample.token_ids.tolist()
    assert some_games.Counting.closed == 2
    seeds = [
        (await plays(Game(counting).environment(), tokenizer, ["9"], prompt=replace(prompt, columns={}))).text
        for _ in range(2)
    ]
    assert seeds[0] == seeds[1], "rollouts of a prompt begin alike"
    texts = {"observation": "some_games:said", "action": "some_games:shout"}
    asynchronous = {"api": "openenv", "make": "some_games:Asynchronous", **texts}
    played = await plays(Game(asynchronous).environment(), tokenizer, [" ", "hello"], prompt=prompt)
    assert "Count.\n\nsay hello<|im_end|>" in played.text
    assert (played.rollout.reward.value, played.count("invalid_actions")) == (1.0, 1)


async def test_an_observation_of_ten_megabytes_is_cut(plays: Any, tokenizer: Any, plain_prompt: Prompt) -> None:
    prompt = replace(plain_prompt, messages=({"role": "user", "content": "Count."},))
    options = {"api": "openenv", "make": "some_games:Huge", "action": "text", "max_observation_chars": 20}
    played = await plays(Game(options).environment(), tokenizer, ["a", "b"], prompt=prompt)
    cut = f"{'x' * 20}\n[truncated: the first 20 of 10000000 characters]<|im_end|>"
    assert f"Count.\n\n{cut}" in played.text, "the first observation"
    assert f"<|im_start|>user\n{cut}" in played.text, "a later one"
    long = {**options, "max_observation_chars": 10_000_000}
    with pytest.raises(BackendError, match=r"it has \d+ tokens or more"):
        await plays(Game(long).environment(), tokenizer, ["a"], prompt=prompt)
    played = await plays(Game({**long, "arguments": {"begins": 1}}).environment(), tokenizer, ["a"], prompt=prompt)
    assert played.rollout.status == "truncated", "no room for a later one"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", r"reset of the game 'some_games:Broken' raised LookupError: no level"),
        ("hangs", r"did not end within 0.2 s \(options.call_timeout_s\)"),
        ("lies", r"the game gave the reward nan; it must be finite"),
    ],
)
async def test_a_game_that_misbehaves_excludes_its_rollout(how: str, words: str, plays: Any, tokenizer: Any) -> None:
    options = {"api": "openenv", "make": "some_games:Broken", "arguments": {"how": how}, "call_timeout_s": 0.2}
    begin = time.monotonic()
    with pytest.raises(BackendError, match=words):
        await plays(Game(options).environment(), tokenizer, ["1"])
    assert time.monotonic() - begin < 5.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"make": "NoLake-v1"}, "is no game of gymnasium"),
        ({"make": "NoLake-v1", "api": "openenv"}, "it is a package.module:function"),
        ({"make": "some_games:missing"}, "options.make 'some_games:missing' cannot be imported"),
        ({**LAKE, "action": "guess"}, "options.action is 'guess'; it is auto, text, number, name or"),
        ({**LAKE, "action": "name", "actions": ()}, "options.action=name needs options.actions"),
        ({**LAKE, "observation": "some_games:GAMES"}, "options.observation 'some_games:GAMES' cannot be imported"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=words):
        Game(options).environment()


async def test_a_seed_that_is_no_integer_is_refused(plays: Any, tokenizer: Any, plain_prompt: Prompt) -> None:
    prompt = replace(plain_prompt, messages=({"role": "user", "content": "?"},), columns={"seed": "x"})
    with pytest.raises(BackendError, match="column seed of the row is 'x'; it must be an integer"):
        await plays(
            Game({"api": "openenv", "make": "some_games:Counting"}).environment(), tokenizer, ["1"], prompt=prompt
        )
