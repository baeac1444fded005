"""Ray's object store in a round: what is not needed any more does not fill it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.training.engine import ray_cluster

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PIECE, PIECES = 8 << 20, 40


class Sender:
    def __init__(self) -> None:
        self.received = 0

    def receive(self, data: bytes) -> None:
        self.received += len(data)

    def send(self, size: int) -> bytes:
        return bytes(size)


def shared_memory() -> int:
    """Bytes of the session's object store that this process has used."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssShmem"].split()[0]) << 10


def test_pieces_that_were_received_leave_the_object_store_at_once() -> None:
    """In both directions, as those of a checkpoint. Memory that the store has used once stays its own."""
    import ray

    actor = ray_cluster.start(Sender, gpus=0)
    try:
        before = shared_memory()
        for _ in range(PIECES):
            [piece] = ray_cluster.wait([actor.send.remote(PIECE)])
            ray_cluster.on_all([actor], "receive", ray.put(piece))
        assert shared_memory() - before < PIECES * PIECE / 2
    finally:
        ray.kill(actor)
