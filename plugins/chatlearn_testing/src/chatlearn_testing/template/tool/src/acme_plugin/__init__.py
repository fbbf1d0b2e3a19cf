"""The tool ``acme`` for ChatLearn."""
