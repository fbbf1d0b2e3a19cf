"""Rollout management between the flow and the generator replicas, including rollouts that span several steps."""
