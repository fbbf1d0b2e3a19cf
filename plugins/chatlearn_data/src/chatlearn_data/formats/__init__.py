"""Dataset formats: one file a format."""
