"""Trainer "fsdp" of ChatLearn: PyTorch FSDP2 on Hugging Face models, with packed sequences and dynamic micro-batches."""

__version__ = "0.1.0"
