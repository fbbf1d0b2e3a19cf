"""Which role is the policy does not depend on what roles are called, nor on their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.policy import policy_of


def find(learners: str, declared: str | None = None, **heads: str) -> str | None:
    """The policy of an algorithm that trains these roles, among roles with these heads."""
    roles = {name: SimpleNamespace(kind="trainer", head=head) for name, head in heads.items()}
    config: Any = SimpleNamespace(algorithm=SimpleNamespace(name="acme"), roles=roles)
    algorithm: Any = SimpleNamespace(policy=declared)
    return policy_of(algorithm, learners.split(), config)


def test_the_only_language_model_that_learns_is_the_policy() -> None:
    assert find("learner", first="lm", learner="lm", reference="lm") == "learner"
    assert find("critic learner", critic="value", learner="lm") == "learner"
    assert find("critic", critic="value") is None, "nothing to sync"


def test_of_several_the_algorithm_says_which() -> None:
    assert find("helper learner", "learner", helper="lm", learner="lm") == "learner"
    assert find("learner helper", "learner", learner="lm", helper="lm") == "learner"
    with pytest.raises(ConfigError, match="'acme' trains the language models 'helper', 'learner' and does not say"):
        find("helper learner", helper="lm", learner="lm")


@pytest.mark.parametrize("declared", ["reference", "critic", "nobody"])
def test_a_policy_that_learns_no_language_is_refused(declared: str) -> None:
    with pytest.raises(ConfigError, match=rf"declares the role '{declared}' as its policy.*roles\.{declared}"):
        find("learner critic", declared, reference="lm", learner="lm", critic="value")


def test_no_other_role_has_the_name_of_the_policys_metrics() -> None:
    assert find("policy", policy="lm", reference="lm") == "policy"
    with pytest.raises(ConfigError, match=r"roles\.policy is not the policy.*'learner'.*Rename the role"):
        find("learner", policy="lm", learner="lm")
