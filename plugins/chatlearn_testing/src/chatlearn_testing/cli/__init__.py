"""The commands ``chatlearn plugins new`` and ``chatlearn plugins check``."""
