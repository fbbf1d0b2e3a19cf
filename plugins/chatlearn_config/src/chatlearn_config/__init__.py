"""Reads YAML settings for pydantic models, and reports every problem with the place where it was written."""
