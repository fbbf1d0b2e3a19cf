"""The names by which vLLM finds ``weight_transfer``. They are separate because that module imports vLLM."""

BACKEND = "chatlearn"
"""The engine's name in vLLM's registry of weight-transfer engines."""
WORKER_EXTENSION = f"{__package__}.weight_transfer.WorkerExtension"
"""Class that vLLM imports in every worker."""
