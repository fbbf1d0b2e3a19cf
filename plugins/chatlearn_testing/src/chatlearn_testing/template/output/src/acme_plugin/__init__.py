"""Output acme for ChatLearn: how much likelier the likeliest token is than the next."""
