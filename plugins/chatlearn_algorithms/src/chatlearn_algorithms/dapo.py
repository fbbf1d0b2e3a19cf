"""DAPO (arXiv 2503.14476): GRPO with clip-higher, dynamic sampling, a mean over tokens and overlong shaping.

Clip-higher (section 3.1), dynamic sampling (3.2) and the token mean (3.3) are defaults of the options; overlong shaping
(3.4) needs the length of its buffer. ``GroupBased`` samples and shapes, for the other algorithms with groups, too.
"""

from __future__ import annotations

from chatlearn_algorithms.grpo import GroupNormalised
from chatlearn_algorithms.grpo_options import DAPOOptions
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient


class DAPO(GroupNormalised[DAPOOptions], ClippedPolicyGradient[DAPOOptions]):
    """Excludes groups whose verdicts are all equal, and samples other groups in their place."""
