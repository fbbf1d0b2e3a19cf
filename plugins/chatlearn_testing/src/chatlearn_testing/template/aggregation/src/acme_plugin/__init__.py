"""Aggregation acme for ChatLearn: sequences weigh by a power of their length."""
