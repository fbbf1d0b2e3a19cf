"""Reader acme for ChatLearn: rows of files of tab-separated values."""
