"""Rules between settings, by what they are about."""
