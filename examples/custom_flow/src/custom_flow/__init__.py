"""Flows of one's own; ``plugin`` lists everything that this package adds."""
