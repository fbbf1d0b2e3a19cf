"""The environment ``acme`` for ChatLearn."""
