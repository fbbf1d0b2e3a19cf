"""Checks engine argument names against the ``EngineArgs`` class of the installed vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from chatlearn_hosting.engine_side.argument_names import check_names


def engine_args(arguments: Mapping[str, Any]) -> Any:
    """Return ``vllm.EngineArgs`` with these arguments.

    Raises:
        UnknownArgumentsError: the installed vLLM has no such argument.
    """
    from vllm.engine.arg_utils import EngineArgs

    check_names(arguments, (field.name for field in dataclasses.fields(EngineArgs)))
    return EngineArgs(**arguments)
