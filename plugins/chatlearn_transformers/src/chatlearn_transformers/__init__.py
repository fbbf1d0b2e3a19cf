"""Generator "transformers" of ChatLearn: continuous batching on a Hugging Face model, the embedded default."""

__version__ = "0.1.0"
