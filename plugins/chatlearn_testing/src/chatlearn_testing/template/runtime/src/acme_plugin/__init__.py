"""The runtime ``acme`` for ChatLearn."""
