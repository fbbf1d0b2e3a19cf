"""Weight transports: ``direct`` (same process) and ``checkpoint`` (safetensors on a shared disk)."""
