"""Command acme for ChatLearn: the last metrics of a run."""
