"""Sample filter acme for ChatLearn: leaves out completions much longer than those so far."""
