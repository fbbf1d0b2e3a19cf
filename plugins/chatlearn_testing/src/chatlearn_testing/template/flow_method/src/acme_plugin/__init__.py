"""Flow method trainer.acme for ChatLearn: the mean logprob of each sample."""
