"""Dataset formats of ChatLearn and the recipes behind "chatlearn data prepare"."""

__version__ = "0.1.0"
