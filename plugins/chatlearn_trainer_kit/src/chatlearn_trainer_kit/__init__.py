"""Code that trainer backends share: micro-batches, optimizers, schedules, offload, refusal of non-finite updates,
timing.
"""

__version__ = "0.1.0"
