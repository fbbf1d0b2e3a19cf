"""The command line ``chatlearn``: its own commands, and whatever plugins add with ``chatlearn_cli_commands``."""
