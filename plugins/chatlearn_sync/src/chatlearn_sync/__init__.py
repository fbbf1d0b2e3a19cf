"""Weight transports of ChatLearn: direct (same process) and checkpoint (safetensors on a shared disk)."""

__version__ = "0.1.0"
