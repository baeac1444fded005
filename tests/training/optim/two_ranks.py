"""One of two training processes: takes a step on its part of the rows and writes the gradient to a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(directory: Path) -> None:
    import torch

    from tests.training.optim.test_grpo import Trained, rows

    # Rollouts are not divided. The parts have different numbers of micro-batches.
    rank = int(os.environ["RANK"])
    own = [row for row in rows() if (row.rollout in (0, 1)) == (rank == 0)]
    done = Trained(directory / f"rank-{rank}", own, loss_type="grpo", micro_batch_tokens=15)
    assert done.trainer.accelerator.num_processes == 2
    torch.save([done.gradients[0], done.logs], directory / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
