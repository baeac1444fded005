"""The processes that train one adapter together (`training.workers`), numbered by their ranks.

The first one, rank 0, has the rollouts, decides, reports and saves; the others take their parts of each step and wait
for the next. PyTorch's process group connects them: accelerate finds it, wraps the model as DDP and broadcasts its
weights. What DDP would do in backward passes happens once behind them (`add_gradients`): a process that runs out of
memory in a pass then leaves no other one waiting, and each may have any number of passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from torch.nn import Parameter

T = TypeVar("T")

_ENDED: Final = "ended"


class EndedError(Exception):
    """Rank 0 does not go on."""


class Ranks:
    """This process among those that train together; by default it is the only one."""

    def __init__(self, rank: int = 0, workers: int = 1) -> None:
        self.rank, self.workers = rank, workers

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def scatter(self, make: Callable[[], Sequence[T]]) -> T:
        """This process's part of what `make` returns in rank 0, a part for each. What it raises there is raised there
        alone, and is EndedError in the others."""
        if self.workers == 1:
            return make()[0]
        from torch.distributed import scatter_object_list

        parts: Any = [_ENDED] * self.workers
        try:
            if self.is_first:
                parts = list(make())
        finally:
            received: list[Any] = [None]
            # Of gloo, whose waiting takes no GPU.
            scatter_object_list(received, parts if self.is_first else None, src=0)
        if received[0] == _ENDED:
            raise EndedError
        return received[0]  # type: ignore[no-any-return]

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in rank 0, as `scatter` does."""
        return self.scatter(lambda: [make()] * self.workers)


@contextlib.contextmanager
def by_itself(accelerator: Any) -> Iterator[None]:
    """TRL gathers the figures of each micro-batch. In this context, each process has its own alone."""
    names = ("gather", "gather_for_metrics", "reduce") if accelerator.num_processes > 1 else ()
    for name in names:
        setattr(accelerator, name, lambda figures, *_, **__: figures)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)


def total(accelerator: Any, *figures: float) -> list[float]:
    """The sum of each figure over all processes."""
    if accelerator.num_processes == 1:
        return list(figures)
    import torch

    own = torch.tensor(figures, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(own, reduction="sum").tolist()  # type: ignore[no-any-return]


def add_gradients(accelerator: Any, weights: Iterable[Parameter]) -> None:
    """Replace each gradient by its sum over all processes. One that no process has stays None: the optimizer leaves
    such a weight as it is."""
    import torch

    trained = [weight for weight in weights if weight.requires_grad]
    if accelerator.scaler is not None and all(weight.grad is None for weight in trained):
        # The scaler of half precision refuses an optimizer step without gradients.
        accelerator.backward(sum(weight.sum() for weight in trained) * 0.0)
    if accelerator.num_processes == 1:
        return
    found = total(accelerator, *(float(weight.grad is not None) for weight in trained))
    own = [weight for weight, number in zip(trained, found, strict=True) if number]
    if not own:
        return
    grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in own]
    summed = accelerator.reduce(torch.cat([grad.flatten() for grad in grads]), reduction="sum")
    for weight, part in zip(own, summed.split([weight.numel() for weight in own]), strict=True):
        weight.grad = part.view_as(weight)
