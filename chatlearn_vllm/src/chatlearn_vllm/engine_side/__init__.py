"""What runs beside vLLM, in whichever process and interpreter holds it.

Imported here are vLLM, torch, numpy, safetensors and the standard library, and of ChatLearn only
``chatlearn_hosting.engine_side``, which comes along. Every value that crosses to the adapter is made of Python's
own types: the interpreter that holds the engine may have nothing else.
"""
