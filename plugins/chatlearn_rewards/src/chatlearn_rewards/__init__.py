"""Rewards: ``math``, ``gsm8k``, ``format`` and plain Python functions, the untrusted ones in a killable process pool.

Importing this package imports nothing else: the pool's workers start from it and must start fast.
"""
