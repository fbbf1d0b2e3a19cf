"""The launcher ``acme`` for ChatLearn."""
