"""Hosting: an engine in a process of its own, perhaps in another interpreter that has nothing of ChatLearn.

``HostedProcess`` runs an object there and calls it; ``SharedBlock`` hands it tensors without a copy. What runs in the
other process may import ``engine_side``, the standard library and what its interpreter has.
"""

from chatlearn_hosting.process import HostedProcess
from chatlearn_hosting.shared_block import SharedBlock, handle_content

__all__ = ["HostedProcess", "SharedBlock", "handle_content"]
