"""Rules between settings: each names the settings that disagree, their values, and the change to make.

A rule is a function of a valid ``RunConfig`` and the chosen plugins that yields a ``Problem`` for each conflict. Checks
that must open files (models, datasets) happen when the run starts, not here.
"""

from __future__ import annotations

from chatlearn_config.problems import Problem
from chatlearn_core.config.rules.cautions import CAUTION_RULES
from chatlearn_core.config.rules.checked import Checked, Rule
from chatlearn_core.config.rules.evaluation import EVALUATION_RULES
from chatlearn_core.config.rules.paths import PATH_RULES
from chatlearn_core.config.rules.roles import ROLE_RULES
from chatlearn_core.config.rules.rollout import ROLLOUT_RULES
from chatlearn_core.config.rules.sampling import SAMPLING_RULES
from chatlearn_core.config.rules.settings import SETTING_RULES
from chatlearn_core.config.rules.sizes import SIZE_RULES
from chatlearn_core.config.rules.weight_sync import WEIGHT_SYNC_RULES

RULES: tuple[Rule, ...] = (
    *SETTING_RULES,
    *EVALUATION_RULES,
    *PATH_RULES,
    *SIZE_RULES,
    *ROLE_RULES,
    *WEIGHT_SYNC_RULES,
    *SAMPLING_RULES,
    *ROLLOUT_RULES,
)
"""All rules, in the order in which they are applied."""


def crosscheck(checked: Checked) -> list[Problem]:
    """What all rules find."""
    return [problem for rule in RULES for problem in rule(checked)]


def cautions(checked: Checked) -> list[Problem]:
    """Warnings about a valid configuration."""
    return [problem for rule in CAUTION_RULES for problem in rule(checked)]
