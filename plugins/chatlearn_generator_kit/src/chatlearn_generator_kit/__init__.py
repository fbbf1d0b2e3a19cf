"""Code that generator backends share: pending requests, pause and death of a replica, incoming weights, checks."""

__version__ = "0.1.0"
