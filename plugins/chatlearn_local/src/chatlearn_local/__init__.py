"""The runtime ``local``: every role in this process."""

__version__ = "0.1.0"
