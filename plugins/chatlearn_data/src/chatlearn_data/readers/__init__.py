"""Row readers for what the core cannot read with the standard library: one file a kind."""
