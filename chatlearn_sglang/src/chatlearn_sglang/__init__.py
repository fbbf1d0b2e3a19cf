"""The generator "sglang" of ChatLearn: an SGLang engine in its own process and interpreter."""

__version__ = "0.1.0"
