"""Runs a graph on a runtime: experience, training, evaluation, checkpoints, resume."""
