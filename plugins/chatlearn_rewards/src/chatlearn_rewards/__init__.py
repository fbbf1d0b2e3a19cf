"""Rewards: ``math``, ``gsm8k``, ``format`` and plain Python functions; untrusted code runs in killable processes.

Importing this package imports nothing else: the pool's workers start from it and must start fast.
"""
