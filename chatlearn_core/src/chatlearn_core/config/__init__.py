"""A run's configuration: its models (``models``), and reading and checking a file (``load``)."""
