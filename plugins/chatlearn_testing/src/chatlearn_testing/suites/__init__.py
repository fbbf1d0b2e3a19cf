"""The conformance suites, one for each kind of backend; ``chatlearn_testing.__doc__`` shows how to use them."""

from chatlearn_testing.suites.aggregation import AggregationCase, AggregationConformance
from chatlearn_testing.suites.algorithm import AlgorithmConformance
from chatlearn_testing.suites.cli_command import CliCommandConformance
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.dataset import DatasetConformance, RowCase
from chatlearn_testing.suites.environment import EnvironmentCase, EnvironmentConformance
from chatlearn_testing.suites.example_kind import ExampleKindCase, ExampleKindConformance
from chatlearn_testing.suites.flow_method import FlowMethodConformance
from chatlearn_testing.suites.generator import GeneratorConformance
from chatlearn_testing.suites.launcher import LauncherCase, LauncherConformance
from chatlearn_testing.suites.logger import LoggerConformance
from chatlearn_testing.suites.model_family import ModelFamilyConformance
from chatlearn_testing.suites.model_family_models import ModelCase
from chatlearn_testing.suites.output import OutputConformance
from chatlearn_testing.suites.reader import ReaderCase, ReaderConformance
from chatlearn_testing.suites.reward import RewardCase, RewardConformance
from chatlearn_testing.suites.rollout_mode import RolloutModeConformance
from chatlearn_testing.suites.runtime import RuntimeConformance
from chatlearn_testing.suites.sample_filter import FilterCase, SampleFilterConformance
from chatlearn_testing.suites.sampler import SamplerConformance
from chatlearn_testing.suites.schedule import ScheduleConformance
from chatlearn_testing.suites.step_policy import StepCase, StepPolicyConformance
from chatlearn_testing.suites.tool import ToolCase, ToolConformance
from chatlearn_testing.suites.trainer import TrainerConformance
from chatlearn_testing.suites.weight_sync import WeightSyncConformance

__all__ = [
    "AggregationCase",
    "AggregationConformance",
    "AlgorithmConformance",
    "CliCommandConformance",
    "ConformanceSuite",
    "DatasetConformance",
    "EnvironmentCase",
    "EnvironmentConformance",
    "ExampleKindCase",
    "ExampleKindConformance",
    "FilterCase",
    "FlowMethodConformance",
    "GeneratorConformance",
    "LauncherCase",
    "LauncherConformance",
    "LoggerConformance",
    "ModelCase",
    "ModelFamilyConformance",
    "OutputConformance",
    "ReaderCase",
    "ReaderConformance",
    "RewardCase",
    "RewardConformance",
    "RolloutModeConformance",
    "RowCase",
    "RuntimeConformance",
    "SampleFilterConformance",
    "SamplerConformance",
    "ScheduleConformance",
    "StepCase",
    "StepPolicyConformance",
    "ToolCase",
    "ToolConformance",
    "TrainerConformance",
    "WeightSyncConformance",
]
