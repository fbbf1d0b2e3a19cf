"""The generator "transformers" of ChatLearn: continuous batching on a Hugging Face model; the default generator."""

__version__ = "0.1.0"
