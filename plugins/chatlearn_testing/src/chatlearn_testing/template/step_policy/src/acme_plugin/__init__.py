"""Step policy acme for ChatLearn: ends a run that has trained on a number of tokens."""
