"""Generator acme for ChatLearn: samples from a bigram model."""
