"""A run's configuration: the models (``models``), and reading and checking a file (``load``)."""
