"""What runs beside vLLM, in whichever process and interpreter holds it.

Nothing of ChatLearn is imported here, only vLLM, torch, numpy, safetensors and the standard library, and every value
that crosses to the adapter is made of Python's own types: the interpreter that holds the engine may have nothing else.
"""
