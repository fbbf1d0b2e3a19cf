"""Hosting: runs an engine in its own process, possibly under another interpreter without ChatLearn.

``HostedProcess`` builds an object in that process and calls it; ``SharedBlock`` passes tensors to it without a copy.
Code in the other process may import ``engine_side``, the standard library and the packages of its interpreter.
"""

from chatlearn_hosting.process import HostedProcess
from chatlearn_hosting.shared_block import SharedBlock, handle_content

__all__ = ["HostedProcess", "SharedBlock", "handle_content"]
