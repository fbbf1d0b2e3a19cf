"""Row readers for files that the standard library cannot read, one module each."""
