"""Readers of data files and hub datasets, by format."""
