"""Algorithm acme for ChatLearn: REINFORCE with a leave-one-out baseline."""
