"""A step's line of ``metrics.jsonl``: reduced numbers, sorted by name."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.protocols import ExampleSampler
from chatlearn_core.types import Metric, Metrics, SyncReceipt


def values(metrics: Metrics) -> dict[str, float]:
    """Reduced numbers, sorted by name."""
    return {name: metrics[name].value for name in sorted(metrics)}


def throughput(metrics: Metrics) -> dict[str, float]:
    """``perf/throughput``: trained tokens per second of the step."""
    seconds = metrics["timing_s/step"].value
    tokens = metrics["perf/trained_tokens"].value
    return {"perf/throughput": tokens / seconds if seconds else 0.0}


def epochs(sampler: ExampleSampler) -> dict[str, float]:
    """``training/epoch``, or one metric per dataset if there are several."""
    counts = sampler.epochs
    if len(counts) == 1:
        return {"training/epoch": next(iter(counts.values()))}
    return {f"training/epoch/{name}": value for name, value in counts.items()}


def sync_metrics(receipts: Sequence[SyncReceipt]) -> Metrics:
    """Bytes moved to a replica by one weight sync, their share of the weights, and the time of the slowest replica."""
    num_bytes = max(receipt.num_bytes for receipt in receipts)
    weight_bytes = max(receipt.weight_bytes for receipt in receipts)
    return {
        "sync/bytes": Metric(num_bytes, reducer="sum"),
        "sync/payload_share": Metric(num_bytes / weight_bytes if weight_bytes else 1.0),
        "sync/slowest_replica_s": Metric(max(receipt.seconds for receipt in receipts), reducer="max"),
    }
