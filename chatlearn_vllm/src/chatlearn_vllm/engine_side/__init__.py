"""The code that runs beside vLLM, in the process and interpreter that hold the engine.

It imports vLLM, torch, numpy, safetensors and the standard library. Of ChatLearn it imports only
``chatlearn_hosting.engine_side``, which is shipped with it. Every value that crosses to the adapter consists of Python
builtins, because the engine's interpreter may have nothing else installed.
"""
