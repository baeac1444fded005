"""A step whose forward and backward passes run out of memory: it is repeated as a whole, in smaller micro-batches.

Nothing of a failed attempt stays, neither gradients nor figures. The trainers divide a step; this module decides into
how small parts.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from flywheel.errors import TrainError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class MemoryShortError(Exception):
    """Memory does not suffice for a micro-batch of so many items (rows or pairs), and tokens with padding. `longest`
    is the number of tokens of its longest item."""

    def __init__(self, items: int, tokens: int, longest: int) -> None:
        super().__init__(f"out of memory in a micro-batch of {tokens} tokens")
        self.items, self.tokens, self.longest = items, tokens, longest


@contextlib.contextmanager
def micro_batch(items: int, tokens: int, longest: int) -> Iterator[None]:
    """The passes of a micro-batch. Raises MemoryShortError where torch raises its error, of a GPU or of a CPU."""
    try:
        yield
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise MemoryShortError(items, tokens, longest) from error


def fitting(trainer: Any, model: Any, max_tokens: int, passes: Callable[[int], Result]) -> tuple[Result, int]:
    """What `passes(max_tokens)` returns: the passes of a whole step of one of TRL's trainers, in micro-batches of at
    most so many tokens with padding. And the number that sufficed, for the following steps.

    After running out of memory, the number is half the tokens of the micro-batch that did. Raises TrainError when it
    was a single item. Several processes do the same: all of them repeat the step if one ran out of memory, with the
    smallest number, or raise the error. Their passes must not wait for each other.
    """
    figures = {name: tuple(values) for name, values in trainer._metrics["train"].items()}
    while True:
        short: tuple[int, int, int] | None = None
        try:
            result = passes(max_tokens)
        except MemoryShortError as error:
            short = error.items, error.tokens, error.longest
        every = [each for each in gather_object([short]) if each is not None]
        if not every:
            return result, max_tokens
        if alone := [longest for items, _, longest in every if items == 1]:
            raise TrainError(
                f"train on a sample of {alone[0]} tokens",
                "memory does not suffice for it alone",
                "Lower rollout.max_model_len or rollout.max_completion_tokens.",
            )
        failed = min(tokens for _, tokens, _ in every)
        max_tokens = failed // 2
        # From here on, no traceback refers to the tensors of the failed pass.
        model.zero_grad()
        trainer._metrics["train"] = defaultdict(list, {name: list(values) for name, values in figures.items()})
        clear_device_cache(garbage_collection=True)
        if trainer.accelerator.is_main_process:
            log.warning(
                "out of memory in a micro-batch of %d tokens: this step is repeated, and the following ones go on,"
                " with at most %d (training.micro_batch_tokens)",
                failed,
                max_tokens,
            )
