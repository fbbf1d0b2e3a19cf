"""Parts shared by runtimes: fleets of replicas, restarts, timeouts, rewards, environments, weight transfer."""

__version__ = "0.1.0"
