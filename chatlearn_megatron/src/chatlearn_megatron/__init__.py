"""The trainer "megatron" of ChatLearn: Megatron-Core on Hugging Face checkpoints."""

import warnings

__version__ = "0.1.0"

# Without Apex and TransformerEngine, which are optional, Megatron-Core says so at the import of each of its modules.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
