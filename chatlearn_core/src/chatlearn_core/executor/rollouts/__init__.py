"""Rollouts: what stands between the flow and the generator replicas, and rollouts that last longer than a step."""
