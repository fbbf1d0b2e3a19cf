"""Loggers of ChatLearn (TensorBoard, wandb) and "chatlearn report"."""

__version__ = "0.1.0"
