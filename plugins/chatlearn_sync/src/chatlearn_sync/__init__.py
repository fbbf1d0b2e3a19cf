"""Weight transports, by reach: direct, cuda_ipc, shared_memory, broadcast, delta, checkpoint."""
