"""What this package adds. Listing plugins imports this module, so it imports nothing heavy."""

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import AlgorithmSpec, DatasetSpec, EnvironmentSpec, LoggerSpec

OPTIONS = "custom_flow.options:"
SAMPLED = (("trainer", "trainer"), ("generator", "generator"), ("reward", "reward"))


@hookimpl
def chatlearn_algorithms() -> Iterable[AlgorithmSpec]:
    return [
        AlgorithmSpec(
            name="mixed_rewards",
            summary="GRPO whose reward is mixed with the score of a second reward model.",
            factory="custom_flow.mixed_rewards:MixedRewards",
            options=OPTIONS + "MixedRewardsOptions",
            roles=(*SAMPLED, ("style", "trainer")),
        ),
        AlgorithmSpec(
            name="self_play",
            summary="GRPO whose reward is the share of a rival's answers that the policy's answer beats.",
            factory="custom_flow.self_play:SelfPlay",
            options=OPTIONS + "SelfPlayOptions",
            roles=(*SAMPLED, ("rival", "generator")),
        ),
        AlgorithmSpec(
            name="advantage_weighted",
            summary="Advantage-weighted regression (arXiv 1910.00177): imitates good samples more.",
            factory="custom_flow.advantage_weighted:AdvantageWeighted",
            options=OPTIONS + "AdvantageWeightedOptions",
            roles=SAMPLED,
        ),
    ]


@hookimpl
def chatlearn_environments() -> Iterable[EnvironmentSpec]:
    return [
        EnvironmentSpec(
            name="tree_search",
            summary="Expands an answer round by round, and keeps the branch that the policy is most confident of.",
            factory="custom_flow.tree_search:TreeSearch",
            options=OPTIONS + "TreeSearchOptions",
        )
    ]


@hookimpl
def chatlearn_datasets() -> Iterable[DatasetSpec]:
    return [
        DatasetSpec(
            name="choices",
            summary="Multiple choice: question, choices and the number of the right one.",
            factory="custom_flow.choices:ChoicesFormat",
            options=OPTIONS + "ChoicesOptions",
            columns=frozenset({"question", "choices", "right"}),
        )
    ]


@hookimpl
def chatlearn_loggers() -> Iterable[LoggerSpec]:
    return [
        LoggerSpec(
            name="csv",
            summary="Writes chosen metrics to metrics.csv.",
            factory="custom_flow.csv_logger:CSVLogger",
            options=OPTIONS + "CSVOptions",
        )
    ]
