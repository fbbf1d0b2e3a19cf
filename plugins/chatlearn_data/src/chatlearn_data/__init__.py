"""Dataset formats of ChatLearn, and the recipes of "chatlearn data prepare"."""

__version__ = "0.1.0"
