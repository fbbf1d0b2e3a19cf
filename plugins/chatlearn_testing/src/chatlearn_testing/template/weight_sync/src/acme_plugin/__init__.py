"""Weight sync acme for ChatLearn: buckets of tensors in files that both ends see."""
