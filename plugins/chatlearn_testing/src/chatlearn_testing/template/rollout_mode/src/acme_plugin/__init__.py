"""Rollout mode acme for ChatLearn: the rollouts of the next steps are made while a step trains."""
