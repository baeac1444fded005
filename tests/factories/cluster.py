"""A Ray cluster of two nodes on this machine. Their processors and GPUs are only numbers."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

from ray.cluster_utils import Cluster


@contextlib.contextmanager
def two_nodes(*, cpus: int, gpus: int) -> Iterator[str]:
    """The address, for `ray.address`. Each node has this much."""
    # Ray reads its token once in a process: it stays what it is for whatever Ray is started here later.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    node = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": 100 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        nodes.add_node(**node)
        nodes.wait_for_nodes()
        yield nodes.address
    finally:
        nodes.shutdown()
