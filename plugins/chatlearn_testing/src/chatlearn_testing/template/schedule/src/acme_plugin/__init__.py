"""Schedule acme for ChatLearn: from one value to another along half a cosine."""
