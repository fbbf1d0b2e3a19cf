"""Sampler acme for ChatLearn: prompts that the policy solved rest for some passes."""
