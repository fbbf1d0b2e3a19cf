"""Code that generator backends share: pending requests, pause and death of a replica, incoming weights, checks.

``__all__`` is what authors of generators may rely on. A name is imported when it is used, so that
``engine_arguments``, which validates configurations, loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatlearn_generator_kit.engine_arguments import owned_problems, refused
    from chatlearn_generator_kit.incoming_weights import (
        IncomingWeights,
        LoadingReplica,
        checkpoint_headers,
        names_tied_to,
        read_checkpoint,
        require_payload,
        require_ready,
    )
    from chatlearn_generator_kit.manifests import manifest_of
    from chatlearn_generator_kit.pending_request import EngineRequest, PendingRequest
    from chatlearn_generator_kit.replica import GeneratorReplica
    from chatlearn_generator_kit.request_checks import check_request
    from chatlearn_generator_kit.weight_loader import EngineWeightLoader, ReplicaWeightLoader

__version__ = "0.1.0"
__all__ = [
    "EngineRequest",
    "EngineWeightLoader",
    "GeneratorReplica",
    "IncomingWeights",
    "LoadingReplica",
    "PendingRequest",
    "ReplicaWeightLoader",
    "check_request",
    "checkpoint_headers",
    "manifest_of",
    "names_tied_to",
    "owned_problems",
    "read_checkpoint",
    "refused",
    "require_payload",
    "require_ready",
]

_MODULES = {
    "EngineRequest": "pending_request",
    "EngineWeightLoader": "weight_loader",
    "GeneratorReplica": "replica",
    "IncomingWeights": "incoming_weights",
    "LoadingReplica": "incoming_weights",
    "PendingRequest": "pending_request",
    "ReplicaWeightLoader": "weight_loader",
    "check_request": "request_checks",
    "checkpoint_headers": "incoming_weights",
    "manifest_of": "manifests",
    "names_tied_to": "incoming_weights",
    "owned_problems": "engine_arguments",
    "read_checkpoint": "incoming_weights",
    "refused": "engine_arguments",
    "require_payload": "incoming_weights",
    "require_ready": "incoming_weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
