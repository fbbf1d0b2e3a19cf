"""Rollouts that are made while the trainer updates: the rollout modes ``one_step_off`` and ``async``."""

__version__ = "0.1.0"
