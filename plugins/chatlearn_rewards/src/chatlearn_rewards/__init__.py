"""Rewards of ChatLearn: math, gsm8k, format, and plain Python functions in a killable process pool."""

__version__ = "0.1.0"
