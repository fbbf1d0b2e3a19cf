"""The command line ``chatlearn``: its own commands, and those that plugins add with ``chatlearn_cli_commands``."""

__version__ = "0.1.0"
