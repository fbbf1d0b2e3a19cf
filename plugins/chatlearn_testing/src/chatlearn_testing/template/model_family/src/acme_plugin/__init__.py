"""Model family acme for ChatLearn: models with one token per character."""
