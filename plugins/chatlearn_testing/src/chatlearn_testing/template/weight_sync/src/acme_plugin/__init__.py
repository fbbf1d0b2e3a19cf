"""Weight sync acme for ChatLearn: buckets of tensors in files on a disk that both ends share."""
