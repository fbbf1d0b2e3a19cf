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
from chatlearn_testing.suites.logger import LoggerConformance
from chatlearn_testing.suites.output import OutputConformance
from chatlearn_testing.suites.reader import ReaderCase, ReaderConformance
from chatlearn_testing.suites.reward import RewardCase, RewardConformance
from chatlearn_testing.suites.runtime import RuntimeConformance
from chatlearn_testing.suites.sampler import SamplerConformance
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
    "FlowMethodConformance",
    "GeneratorConformance",
    "LoggerConformance",
    "OutputConformance",
    "ReaderCase",
    "ReaderConformance",
    "RewardCase",
    "RewardConformance",
    "RowCase",
    "RuntimeConformance",
    "SamplerConformance",
    "TrainerConformance",
    "WeightSyncConformance",
]
