"""The trainer ``deepspeed``: ZeRO 1, 2 and 3 on Hugging Face models."""

__version__ = "0.1.0"
