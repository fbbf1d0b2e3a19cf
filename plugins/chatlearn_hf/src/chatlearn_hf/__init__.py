"""Code that ChatLearn backends on transformers share: packed forward, heads, checkpoint names, model directories."""

__version__ = "0.1.0"
