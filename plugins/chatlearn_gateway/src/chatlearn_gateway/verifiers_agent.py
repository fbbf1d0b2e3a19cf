"""Runs an environment of the library verifiers (https://github.com/PrimeIntellect-ai/verifiers) as the agent."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_gateway.agents import AgentCall


class VerifiersAgent:
    """One environment, which makes each rollout with a client of the gateway and judges it by its rubric.

    A row's prompt, ground truth (``answer``), and columns ``info`` and ``task`` are the environment's input.

    Args:
        name: an id of ``verifiers.load_environment``, or ``package.module:function``.
        arguments: of the environment.

    Raises:
        ConfigError: there is no such environment, or a package is missing.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        for package in ("verifiers", "openai"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"options.verifiers {name!r} needs the package {package}: "
                    "pip install 'chatlearn-gateway[verifiers]'"
                )
        try:
            if ":" in name:
                self._environment = resolve_import_string(name)(**arguments)
            else:
                library = importlib.import_module("verifiers")  # it has no types
                self._environment = library.load_environment(name, **arguments)
        except Exception as error:  # a third party's code
            raise ConfigError(f"options.verifiers {name!r} does not load: {type(error).__name__}: {error}") from error
        if not callable(getattr(self._environment, "run_rollout", None)):
            raise ConfigError(f"options.verifiers {name!r} is a {type(self._environment).__name__}, not an environment")
        self._name = name

    async def act(self, call: AgentCall) -> dict[str, float]:
        """See ``Agent``. The result has the rubric's reward and its finite metrics."""
        from openai import AsyncOpenAI

        example, columns = call.example, call.example["columns"]
        given = {
            "prompt": [dict(message) for message in example["messages"]],
            "answer": "" if example["ground_truth"] is None else str(example["ground_truth"]),
            "info": columns.get("info") or {},
            "task": columns.get("task") or "default",
            "example_id": example["id"],
        }
        try:
            async with AsyncOpenAI(base_url=call.base_url, api_key=call.api_key, max_retries=0) as client:
                output = await self._environment.run_rollout(given, client, call.model, {})
        except Exception as error:  # a third party's code
            raise BackendError(
                f"verifiers environment {self._name!r} raised {type(error).__name__}: {error}"
            ) from error
        if output.get("error"):
            raise BackendError(
                f"verifiers environment {self._name!r} ended with an error: {str(output['error'])[:500]}"
            )
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items() if _is_finite(value)}
        return {**metrics, "reward": output["reward"]}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
