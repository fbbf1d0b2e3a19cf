"""Trainer acme for ChatLearn: gradient descent on a bigram model."""
