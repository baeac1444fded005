"""The process group of those that train one adapter together (`training.workers`), numbered by their ranks.

PyTorch's process group connects them: accelerate finds it. Ray notices processes that die, and ends the attempt.
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PATIENCE: Final = datetime.timedelta(days=30)
"""How long a process waits for another one."""


def open_store(host: str, workers: int) -> TCPStore:
    """In rank 0: the store by which so many processes find each other, on one of this node's addresses."""
    from torch.distributed import TCPStore

    with socket.create_server((host, 0)) as listening:
        # By itself, a store listens on all of the node's addresses.
        return TCPStore(
            host,
            listening.getsockname()[1],
            workers,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def reach_store(host: str, port: int, workers: int) -> TCPStore:
    """In the others: the store of rank 0."""
    from torch.distributed import TCPStore

    return TCPStore(host, port, workers, timeout=PATIENCE)


def join(store: TCPStore, rank: int, workers: int, host: str) -> None:
    """Wait until all have joined by the store of rank 0. `host` is the address of this node, whose network the
    processes use."""
    import torch

    if interface := _interface(host):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    # What accelerate reads. Ray gives each process one GPU, which is the first that it sees.
    own = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ |= {name: str(value) for name, value in own.items()}
    os.environ |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=PATIENCE)


def _interface(host: str) -> str:
    """The network interface that has an address of this node."""
    of_host = (name for name, found in psutil.net_if_addrs().items() if any(each.address == host for each in found))
    return next(of_host, "")
