"""A driver with a home of its own that joins a cluster whose nodes have homes of their own. Prints one JSON line.

python token_cluster.py ADDRESS [TOKEN_FILE]
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import ray

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_ray.cluster import Cluster
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.placement import PlacementPlan


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def home_and_node() -> tuple[str, str]:
    return str(Path.home()), ray.get_runtime_context().get_node_id()


async def main(address: str, token_file: str | None = None) -> dict[str, object]:
    cluster = Cluster(RayRuntimeOptions(address=address, token_file=token_file))
    try:
        cluster.join(PlacementPlan((), ()), Path.cwd())
    except ChatLearnError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        seen = set()
        while len(seen) < 2:
            seen |= {tuple(found) for found in ray.get([home_and_node.remote() for _ in range(8)])}
        return {"homes": sorted(home for home, _ in seen)}
    finally:
        cluster.leave()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
