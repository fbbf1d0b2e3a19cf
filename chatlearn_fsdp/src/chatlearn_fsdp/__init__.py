"""The trainer "fsdp" of ChatLearn: PyTorch FSDP2 on Hugging Face models, packed and micro-batched by tokens."""

__version__ = "0.1.0"
