"""Dataset formats, one file each."""
