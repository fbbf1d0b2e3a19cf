"""How vLLM finds ``weight_transfer``, apart from it: naming it must not import vLLM."""

BACKEND = "chatlearn"
"""The engine's name in vLLM's registry of weight-transfer engines."""
WORKER_EXTENSION = f"{__package__}.weight_transfer.WorkerExtension"
"""vLLM imports this in every worker."""
