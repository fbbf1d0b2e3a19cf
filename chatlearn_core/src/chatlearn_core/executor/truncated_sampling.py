"""Runs whose logprobs are of the truncated distribution that tokens were sampled from (output ``truncated_logprobs``).

The generator returns the ids that top-k and top-p kept, and every trainer renormalises over them, so that old, current
and reference logprobs have the support of the distribution that was sampled.
"""

from __future__ import annotations

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.flow_checks import Losses
from chatlearn_core.flow import Graph
from chatlearn_core.plugins.compatibility import returns_kept_ids
from chatlearn_core.plugins.records import GeneratorSpec
from chatlearn_core.types import SamplingParams

TRUNCATED_LOGPROBS = "truncated_logprobs"
"""Name of the output that needs the ids that tokens were sampled from."""
TIED_IDS = 16
"""Least room for ids whose logits equal the k-th: they are kept, too, and half-precision logits often tie."""


def max_kept_ids(loaded: LoadedConfig, graph: Graph, losses: Losses, sampling: SamplingParams) -> int:
    """Ids per token that the generators of training rollouts must return; 0 if neither flow nor losses read them.

    Ids tied with the k-th are kept beyond ``top_k``, so there is room for as many again unless the setting says more.

    Raises:
        ConfigError: nothing bounds the number of ids, or a generator does not return what it sampled from.
    """
    if not _reads_kept_ids(graph, losses):
        return 0
    room = loaded.config.sampling.max_kept_ids or 0
    cuts = sampling.top_k > 0 or (room > 0 and sampling.top_p < 1.0)
    if not cuts or not sampling.temperature or 0 < room < sampling.top_k:
        raise ConfigError(
            f"{loaded.source}: algorithm {loaded.config.algorithm.name!r} computes {TRUNCATED_LOGPROBS}, for which "
            "every token carries the ids that it was sampled from, and sampling.top_k, or sampling.max_kept_ids with "
            f"sampling.top_p below 1, bounds their number: sampling.top_k is {sampling.top_k}, sampling.top_p "
            f"{sampling.top_p:g}, sampling.max_kept_ids {room or 'not set'} and sampling.temperature "
            f"{sampling.temperature:g}. Set sampling.top_k above 0 (such as 64), or sampling.max_kept_ids (such as "
            "512, at least top_k), and a temperature above 0"
        )
    for name, role in loaded.config.roles.items():
        if role.kind != "generator" or name not in _sampling_roles(loaded, graph):
            continue
        choice = loaded.plugin("roles", name)
        assert isinstance(choice.record, GeneratorSpec)
        if not returns_kept_ids(choice.record, choice.options):
            raise ConfigError(
                f"{loaded.source}: algorithm {loaded.config.algorithm.name!r} computes {TRUNCATED_LOGPROBS}, which "
                f"needs the ids that each token was sampled from, and generator {choice.record.name!r} (roles.{name}) "
                "with these options does not return them (GeneratorSpec.kept_ids). Choose transformers, sglang, or "
                "vllm with logprobs: processed; or sample with top_p 1 and top_k 0"
            )
    return room or sampling.top_k + max(sampling.top_k, TIED_IDS)


def _reads_kept_ids(graph: Graph, losses: Losses) -> bool:
    calls = any(output.name == TRUNCATED_LOGPROBS for node in graph.nodes for output in node.outputs)
    return calls or any(TRUNCATED_LOGPROBS in loss.needs.names for of_role in losses.values() for loss in of_role)


def _sampling_roles(loaded: LoadedConfig, graph: Graph) -> set[str]:
    """The roles whose tokens become samples: called by the flow, or used by its environments."""
    called = {node.role for node in graph.nodes}
    environments = [role for name, role in loaded.config.roles.items() if role.kind == "environment" and name in called]
    return called.union(*(environment.used_roles for environment in environments))
