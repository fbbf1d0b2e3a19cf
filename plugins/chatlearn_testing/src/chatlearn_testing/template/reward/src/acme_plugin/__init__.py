"""Reward acme for ChatLearn: keywords covered, less a penalty for length."""
