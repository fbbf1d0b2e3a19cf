"""The part of ``chatlearn_hosting`` that runs in the engine's interpreter. It imports the standard library and torch
only.
"""
