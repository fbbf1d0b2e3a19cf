"""Algorithms of ChatLearn: policy gradients and supervised fine-tuning, each a flow, an advantage and a loss."""

__version__ = "0.1.0"
