"""The rollout mode ``acme`` for ChatLearn."""
