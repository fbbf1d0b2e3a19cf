"""Everything that a third party may add with hooks alone."""
