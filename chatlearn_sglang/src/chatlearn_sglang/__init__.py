"""Generator "sglang" of ChatLearn: an SGLang engine in a process, and an interpreter, of its own."""

__version__ = "0.1.0"
