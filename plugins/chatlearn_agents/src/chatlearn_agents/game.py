"""Games with the interfaces of Gymnasium and OpenEnv, behind one protocol of texts."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from chatlearn_agents.options import GameOptions
from chatlearn_agents.tool_threads import ToolThreads
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.import_string import resolve_import_string

_INTEGER = re.compile(r"-?\d+")


class InvalidActionError(Exception):
    """A turn is no action; the game does not see it."""


@dataclass(slots=True, frozen=True)
class GameStep:
    """What a game answers to an action."""

    observation: Any
    reward: float
    ended: bool
    truncated: bool = False
    """It ended by a limit of its own, not by its rules."""


class Game(Protocol):
    """One game that is being played."""

    async def reset(self, seed: int) -> Any:
        """Begin; returns the first observation."""

    async def step(self, action: Any) -> GameStep:
        """Act."""

    async def close(self) -> None:
        """Release it."""

    @property
    def made(self) -> Any:
        """The object of the user's."""


class GymnasiumGame:
    """``reset(seed=) -> (observation, info)``; ``step -> (observation, reward, terminated, truncated, info)``.

    Calls run in threads, because such games block.
    """

    def __init__(self, made: Any, threads: ToolThreads) -> None:
        self.made = made
        self._threads = threads

    async def reset(self, seed: int) -> Any:
        """See ``Game``."""
        observation, _ = await self._threads.run(lambda: self.made.reset(seed=seed))
        return observation

    async def step(self, action: Any) -> GameStep:
        """See ``Game``."""
        found = await self._threads.run(lambda: self.made.step(action))
        observation, reward, terminated, truncated, _ = found
        return GameStep(observation, float(reward), bool(terminated or truncated), bool(truncated and not terminated))

    async def close(self) -> None:
        """See ``Game``."""
        await self._threads.run(self.made.close)


class OpenEnvGame:
    """``reset()`` and ``step(action)`` return a result with ``observation``, ``reward`` and ``done``.

    The client is synchronous (called in threads) or asynchronous (awaited on the environment's loop). ``reset`` gets
    the seed if it has a parameter for it.
    """

    def __init__(self, made: Any, threads: ToolThreads) -> None:
        self.made = made
        self._threads = threads

    async def reset(self, seed: int) -> Any:
        """See ``Game``."""
        parameters = inspect.signature(self.made.reset).parameters
        takes = "seed" in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        result = await self._called(self.made.reset, **({"seed": seed} if takes else {}))
        return result.observation

    async def step(self, action: Any) -> GameStep:
        """See ``Game``."""
        result = await self._called(self.made.step, action)
        return GameStep(result.observation, float(result.reward or 0.0), bool(result.done))

    async def close(self) -> None:
        """See ``Game``."""
        if hasattr(self.made, "close"):
            await self._called(self.made.close)

    async def _called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await self._threads.run(lambda: function(*args, **kwargs))


def game_maker(options: GameOptions) -> Callable[[], Any]:
    """The function that makes a game.

    Raises:
        ConfigError: it cannot be imported, or gymnasium is missing or has no such id.
    """
    path = options.make
    if ":" in path:
        function = _imported("make", path)
        return lambda: function(**options.arguments)
    if options.api != "gymnasium":
        raise ConfigError(f"options.make {path!r}: with api={options.api} it is a package.module:function")
    if importlib.util.find_spec("gymnasium") is None:
        raise ConfigError(f"options.make {path!r} needs the package gymnasium: pip install 'chatlearn-agents[games]'")
    gymnasium: Any = importlib.import_module("gymnasium")  # need not be installed where types are checked
    try:
        gymnasium.spec(path)
    except gymnasium.error.Error as error:
        raise ConfigError(f"options.make {path!r} is no game of gymnasium: {error}") from error
    return lambda: gymnasium.make(path, **options.arguments)


def observation_text(options: GameOptions) -> Callable[[Any, Any], str]:
    """``(game, observation) -> text``.

    Raises:
        ConfigError: ``options.observation`` cannot be imported.
    """
    if options.observation is not None:
        function = _imported("observation", options.observation)
        return lambda made, observation: str(function(observation))

    def text_of(made: Any, observation: Any) -> str:
        if not isinstance(observation, str) and getattr(made, "render_mode", None) == "ansi":
            observation = made.render()
        return str(observation).strip()

    return text_of


def action_of(options: GameOptions) -> Callable[[Any, str], Any]:
    """``(game, text of a turn) -> action``, which raises InvalidActionError.

    Raises:
        ConfigError: ``options.action`` is unknown, or lacks ``options.actions``.
    """
    kind, names = options.action, [name.lower() for name in options.actions]
    if kind == "name" and not names:
        raise ConfigError("options.action=name needs options.actions, the names of the actions 0, 1, ...")
    if ":" in kind:
        function = _imported("action", kind)

        def by_function(made: Any, text: str) -> Any:
            try:
                return function(text)
            except ValueError as error:
                raise InvalidActionError(str(error)) from error

        return by_function
    if kind not in ("auto", "text", "number", "name"):
        raise ConfigError(f"options.action is {kind!r}; it is auto, text, number, name or package.module:function")

    def of_text(made: Any, text: str) -> Any:
        space = getattr(made, "action_space", None)
        discrete = space is not None and type(space).__name__ == "Discrete"
        if kind == "name" or (kind == "auto" and names):
            return _named(text.lower(), names)
        if kind == "number" or (kind == "auto" and discrete):
            number = _number(text)
            if discrete and not space.start <= number < space.start + space.n:  # type: ignore[union-attr]  # as above
                raise InvalidActionError(f"{number} is no action")
            return number
        return text

    return of_text


def checked_reward(value: float) -> float:
    """Raises ValueError: it is not finite."""
    if not math.isfinite(value):
        raise ValueError(f"the game gave the reward {value}; it must be finite")
    return value


def _named(text: str, names: list[str]) -> int:
    """The name that ends last in the text; of several, the longest."""
    found = [(text.rfind(name) + len(name), len(name), index) for index, name in enumerate(names) if name in text]
    if not found:
        raise InvalidActionError("the turn names no action")
    return max(found)[2]


def _number(text: str) -> int:
    found = _INTEGER.findall(text)
    if not found:
        raise InvalidActionError("the turn has no number")
    return int(found[-1])


def _imported(key: str, path: str) -> Callable[..., Any]:
    try:
        function = resolve_import_string(path)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"options.{key} {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(f"options.{key} {path!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # checked
