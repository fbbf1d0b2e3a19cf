"""Dataset format acme for ChatLearn: multiple-choice questions."""
