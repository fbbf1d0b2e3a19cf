"""Kind of examples acme for ChatLearn: completions to imitate, each with a weight."""
