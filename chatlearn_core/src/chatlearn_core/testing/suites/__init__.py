"""The conformance suites, one for each kind of backend. ``chatlearn_core.testing`` says how to use them."""

from chatlearn_core.testing.suites.conformance_suite import ConformanceSuite
from chatlearn_core.testing.suites.generator import GeneratorConformance
from chatlearn_core.testing.suites.reward import RewardCase, RewardConformance
from chatlearn_core.testing.suites.trainer import TrainerConformance
from chatlearn_core.testing.suites.weight_sync import WeightSyncConformance

__all__ = [
    "ConformanceSuite",
    "GeneratorConformance",
    "RewardCase",
    "RewardConformance",
    "TrainerConformance",
    "WeightSyncConformance",
]
