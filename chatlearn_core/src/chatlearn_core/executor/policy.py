"""The policy role: its weights are served by the generators and exported by the run."""

from __future__ import annotations

from collections.abc import Collection

from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Algorithm

POLICY_METRICS = "policy"
"""Prefix of the policy's metrics, independent of its role's name."""


def policy_of(algorithm: Algorithm, learners: Collection[str], config: RunConfig) -> str | None:
    """The role that the algorithm declares as its policy, or the only language model that it trains; None if it trains
    no language model.

    Raises:
        ConfigError: the declared role has no loss or no language-model head, several roles could be the policy, or
            another role has the name under which the policy's metrics are logged.
    """
    name = config.algorithm.name
    language_models = [role for role in learners if role in config.roles and config.roles[role].head == "lm"]
    declared = algorithm.policy
    if declared is None and len(language_models) > 1:
        raise ConfigError(
            f"algorithm {name!r} trains the language models {', '.join(map(repr, language_models))} and does not say "
            "which of them is the policy, whose weights the generators serve. Its class must have an attribute "
            "'policy' that names the role"
        )
    if declared is not None and declared not in language_models:
        raise ConfigError(
            f"algorithm {name!r} declares the role {declared!r} as its policy, but that is no language model with a "
            f"loss (it trains {', '.join(map(repr, learners)) or 'none'}). Correct the attribute 'policy' of its "
            f"class, or roles.{declared}"
        )
    policy = declared or next(iter(language_models), None)
    if POLICY_METRICS in config.roles and policy not in (None, POLICY_METRICS):
        raise ConfigError(
            f"roles.{POLICY_METRICS} is not the policy of algorithm {name!r} (that is {policy!r}), but the policy's "
            f"metrics are logged under '{POLICY_METRICS}/'. Rename the role"
        )
    return policy
