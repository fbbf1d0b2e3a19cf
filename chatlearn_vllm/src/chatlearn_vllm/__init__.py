"""The generator "vllm" of ChatLearn: vLLM in the worker's process, in a child process, or under another interpreter."""

__version__ = "0.1.0"
