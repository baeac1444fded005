"""Steps of the optimizer on rows or pairs of tokens. Whoever has the items drives them: here are no loop, no rollout,
no file of the round, and no report.

A step is repeated as a whole, in smaller micro-batches, where its passes run out of memory. With several processes
(`training.workers`), each has its own items of a step and any number of micro-batches: gradients are added up once
behind them, so that no process waits for another one in a pass, and one that runs out of memory leaves none waiting.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import get_scheduler

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.serving.adapter_files import FILES
from flywheel.training.data.samples import StepSize, TrainingRow
from flywheel.training.engine.policy import write_adapter
from flywheel.training.optim.losses import Loss, MicroBatch, RowLoss

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 2 << 20
"""Of an adapter and of a checkpoint, in their pieces: about so many. A tensor of a checkpoint is not divided."""
WEIGHTS: Final = "weights-"
"""Prefix of the pieces of a checkpoint that have weights, or what the optimizer has of them."""
STATE: Final = "state.pt"
"""The piece with what else a checkpoint has of the first process."""


class PolicyStep:
    """The steps of one stage.

    Attributes:
        steps: Number of those taken.
        max_tokens: Of a micro-batch, with padding.
    """

    def __init__(self, loss: Loss, settings: Config, steps: int, temporary: Path | None = None) -> None:
        """`settings` are those of the stage, which has so many steps; `temporary` is where temporary files are. All
        processes must make theirs at a time."""
        training, rollout = settings.training, settings.rollout
        self.steps, self._temporary = 0, temporary
        self.max_tokens = training.micro_batch_tokens or training.micro_batch_size * rollout.max_model_len
        self._loss, self._accelerator, self._max_norm = loss, loss.everyone, training.max_grad_norm
        # TRL's copy of the adapter, its reference, is not trained.
        named = loss.model.named_parameters()
        self._weights = [weight for name, weight in named if weight.requires_grad and ".ref." not in name]
        adam = torch.optim.AdamW(self._weights, training.learning_rate, weight_decay=0.0, fused=True)
        # Of several processes it is wrapped as DDP, which gives all of them the weights of the first one. Passes are
        # of the model itself: those of DDP may wait for other processes.
        _, self._optimizer = self._accelerator.prepare(loss.model, adam)
        updates, warmup = steps * loss.updates, training.warmup_steps
        # Below 1 it is a share of all updates.
        warmup_updates = math.ceil(warmup * (loss.updates if warmup >= 1 else updates))
        self._schedule = get_scheduler(
            # Of transformers' schedules, this one alone ignores the warm-up.
            "constant_with_warmup" if training.scheduler == "constant" else training.scheduler,
            self._optimizer,
            # The learning rate of the first update of a warm-up is 0. A run that ends in it may have no other.
            min(warmup_updates, updates - 1),
            updates,
        )

    def step(self, items: Sequence[Any], size: StepSize | None = None) -> dict[str, float]:
        """Train on this process's items of a step, whose whole `size` is by default theirs. All processes must.

        Returns the figures of its last update, the same in each: `loss`, `grad_norm`, `learning_rate`, and if there
        was an item in any process, `micro_batches` and those of the loss. An update with a loss or a gradient that is
        not a number is the last one. Raises TrainError where a single item does not fit into memory.

        In half precision, an update whose gradients overflow is repeated with half the scale of the loss.
        """
        self._loss.model.train()
        batches = self._loss.batches(items, size or StepSize.of(items), self.max_tokens)
        figures: dict[str, float] = {}
        for _ in range(self._loss.updates):
            while True:
                scale = self._scale
                smaller, sums = self._fitting(batches, self._pass, "train on", "step", gather_object)
                figures = self._update(sums)
                # Then the optimizer has left the weights as they were.
                if not (1 <= self._scale < scale and math.isfinite(figures["loss"])):
                    break
            batches = smaller
            self._schedule.step()
            if not (math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"])):
                break
        self.steps += 1
        return figures

    def nll(self, rows: Sequence[TrainingRow]) -> float | None:
        """Mean negative log-likelihood of the trained tokens of rows, in nats; None without any. No other process
        takes part. Raises TrainError where a single row does not fit into memory."""
        loss = self._loss
        assert isinstance(loss, RowLoss)
        loss.model.eval()
        batches = loss.batches(rows, StepSize.of(rows), self.max_tokens)
        with torch.no_grad():
            _, sums = self._fitting(batches, lambda batch: loss.nll(batch).double().cpu(), "measure", "measurement")
        nll, tokens = sums.tolist() if batches else (0.0, 0.0)
        return nll / tokens if tokens else None

    def _fitting(
        self,
        batches: Sequence[MicroBatch],
        take: Callable[[MicroBatch], torch.Tensor],
        verb: str,
        noun: str,
        gather: Callable[[list[Any]], list[Any]] = list,
    ) -> tuple[list[MicroBatch], torch.Tensor]:
        """What passes of micro-batches that `take` makes return, added up, and the micro-batches.

        After running out of memory, all are repeated in micro-batches of half the tokens of the one that did, and so
        are all that follow. Raises TrainError when it was a single item. Several processes do the same: all of them
        repeat theirs if one ran out of memory, with the smallest number, or raise the error.
        """
        while True:
            short: tuple[int, int, int] | None = None
            # These are copies: after a failed attempt, the inputs are what they were.
            smaller = [part for batch in batches for part in batch.divided(self.max_tokens)]
            sums = torch.zeros((), dtype=torch.float64)
            for batch in smaller:
                try:
                    sums = sums + take(batch)
                except RuntimeError as error:
                    if not should_reduce_batch_size(error):
                        raise
                    short = len(batch.lengths), batch.tokens, max(batch.lengths)
                    break
            every = [each for each in gather([short]) if each is not None]
            if not every:
                return smaller, sums
            if alone := [longest for items, _, longest in every if items == 1]:
                raise TrainError(
                    f"{verb} a sample of {alone[0]} tokens",
                    "memory does not suffice for it alone",
                    "Lower rollout.max_model_len or rollout.max_completion_tokens.",
                )
            failed = min(tokens for _, tokens, _ in every)
            self.max_tokens = failed // 2
            # From here on, no traceback refers to the tensors of the failed pass.
            self._loss.model.zero_grad()
            clear_device_cache(garbage_collection=True)
            if self._accelerator.is_main_process:
                log.warning(
                    "out of memory in a micro-batch of %d tokens: this %s is repeated, and the following ones go on,"
                    " with at most %d (training.micro_batch_tokens)",
                    failed,
                    noun,
                    self.max_tokens,
                )

    def _pass(self, batch: MicroBatch) -> torch.Tensor:
        """Forward and backward pass of a micro-batch. Returns 1, its part of the loss and its figures: (2 + F,)."""
        loss, figures = self._loss.part(batch)
        self._accelerator.backward(loss)
        return torch.cat([torch.stack([torch.ones_like(loss), loss.detach()]), figures]).double().cpu()

    def _update(self, sums: torch.Tensor) -> dict[str, float]:
        """Step of the optimizer. `sums` are those of this process's passes."""
        own = sums if sums.dim() else torch.zeros(2 + len(self._loss.figures), dtype=torch.float64)
        micro_batches, loss, number, *rest = self._total(own).tolist()
        self._add_gradients()
        norm = float(self._accelerator.clip_grad_norm_(self._weights, self._max_norm))
        [rate, *_] = self._schedule.get_last_lr()
        self._optimizer.step()
        self._loss.model.zero_grad()
        figures = {"loss": loss, "grad_norm": norm, "learning_rate": rate}
        if number:
            counted, *means = self._loss.figures
            figures |= {"micro_batches": micro_batches, counted: number}
            figures |= {name: value / number for name, value in zip(means, rest, strict=True)}
        return figures

    @property
    def _scale(self) -> float:
        """Factor of the loss in half precision, which falls by half with each update whose gradients overflow."""
        scaler = self._accelerator.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def _add_gradients(self) -> None:
        """Replace each gradient by its sum over all processes. One that no process has stays None: the optimizer
        leaves such a weight as it is."""
        if self._accelerator.scaler is not None and all(weight.grad is None for weight in self._weights):
            # The scaler of half precision refuses an optimizer step without gradients.
            self._accelerator.backward(sum(weight.sum() for weight in self._weights) * 0.0)
        if self._accelerator.num_processes == 1:
            return
        found = self._total(torch.tensor([float(weight.grad is not None) for weight in self._weights])).tolist()
        own = [weight for weight, number in zip(self._weights, found, strict=True) if number]
        if not own:
            return
        grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in own]
        summed = self._total(torch.cat([grad.flatten() for grad in grads]))
        for weight, part in zip(own, summed.split([weight.numel() for weight in own]), strict=True):
            weight.grad = part.view_as(weight)

    def _total(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return self._accelerator.reduce(own.to(self._accelerator.device), reduction="sum")

    def adapter(self) -> Iterator[tuple[str, bytes]]:
        """The files of the adapter as it is now, in pieces: a file's name and the next of its bytes."""
        # PEFT writes nothing but files.
        with tempfile.TemporaryDirectory(prefix="fw-adapter-", dir=self._temporary) as parent:
            folder = Path(parent) / "adapter"
            write_adapter(self._accelerator.unwrap_model(self._loss.model), folder)
            for name in FILES:
                with (folder / name).open("rb") as file:
                    while data := file.read(PIECE_BYTES):
                        yield name, data

    def checkpoint(self) -> Iterator[tuple[str, bytes]]:
        """What `restore` goes on from, in pieces, so that it is never in memory twice: their names and bytes.

        The first process has all but the random numbers of the others.
        """
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        yield self._numbers, _bytes({"cpu": torch.get_rng_state(), "cuda": cuda})
        if not self._accelerator.is_main_process:
            return
        starts = itertools.accumulate((tensor.nbytes for _, _, tensor in self._tensors()), initial=0)
        placed = zip(starts, self._tensors(), strict=False)
        for piece, found in itertools.groupby(placed, key=lambda each: each[0] // PIECE_BYTES):
            yield f"{WEIGHTS}{piece:05}.pt", _bytes([tensor for _, tensor in found])
        more = {name: part.state_dict() for name, part in self._parts().items()}
        yield STATE, _bytes({**more, "steps": self.steps, "max_tokens": self.max_tokens})

    def restore(self, name: str, data: bytes) -> None:
        """Go on from a piece of a checkpoint of as many processes; in each, from all pieces of all of them."""
        if name == self._numbers:
            numbers = _read(data)
            torch.set_rng_state(numbers["cpu"])
            if numbers["cuda"] is not None:
                torch.cuda.set_rng_state(numbers["cuda"])
        elif name.startswith(WEIGHTS):
            for place, of, tensor in _read(data):
                weight = self._weights[place]
                if of:
                    self._optimizer.state[weight][of] = tensor.to(weight.device)
                else:
                    weight.data.copy_(tensor)
        elif name == STATE:
            state = _read(data)
            for of, part in self._parts().items():
                part.load_state_dict(state[of])
            for group, rate in zip(self._optimizer.param_groups, self._schedule.get_last_lr(), strict=True):
                group["lr"] = rate
            self.steps, self.max_tokens = state["steps"], state["max_tokens"]

    def _tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """The trained weights, and what the optimizer has of them: the place of the weight, the name of a state, or
        "" for the weight itself, and the tensor."""
        yield from ((place, "", weight.detach()) for place, weight in enumerate(self._weights))
        for place, weight in enumerate(self._weights):
            yield from ((place, of, tensor) for of, tensor in self._optimizer.state.get(weight, {}).items())

    @property
    def _numbers(self) -> str:
        return f"numbers-{self._accelerator.process_index}.pt"

    def _parts(self) -> dict[str, Any]:
        """What has a state beside weights and optimizer."""
        parts = {"schedule": self._schedule, "scaler": self._accelerator.scaler}
        return {name: part for name, part in parts.items() if part is not None}


def _bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu")
