"""Runs programs that may be hostile, with limits, and ends all of their processes."""
