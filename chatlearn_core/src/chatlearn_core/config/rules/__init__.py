"""Rules between settings, grouped by subject."""
