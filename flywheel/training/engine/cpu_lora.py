"""LoRA in vLLM on a CPU by two products for the whole batch, instead of one weight matrix per token.

vLLM 0.32 gathers the matrices of each token's adapter: generation with an adapter is several times slower than
without. It also reads the index -1 of requests for the base model as the last slot, so that their answers are those
of the adapter there; here they get nothing added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


@dataclass(frozen=True, slots=True)
class _Batch:
    slots: frozenset[int]
    """Those whose adapters the rows of the batch use."""
    others: torch.Tensor | None
    """Rows × slots: whether the row does not use the slot's adapter. None: all rows use the only one."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """The adapters of all slots for a layer, of which a packed one (`qkv_proj`) has several parts: all `A` below each
    other, and all `B` beside each other, a slot's on the diagonal of its block. Two large products are faster than
    two small ones for each part and each adapter of the batch, whose rows would have to be copied out and back."""

    stacked: tuple[torch.Tensor, ...]
    """What it was made of: kept, so that no other tensor gets the same `id`."""
    versions: tuple[int, ...]
    """How often each of `stacked` had been written."""
    a: torch.Tensor
    """Slots × ranks of all parts × inputs."""
    b: torch.Tensor
    """Outputs of all parts × (slots × ranks of all parts)."""
    used: frozenset[int]
    """Slots whose adapter adds something here."""
    not_finite: frozenset[int]
    """Slots that have an infinite weight or NaN, which no factor of 0 would keep from other rows."""


class LoraByAdapter(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's arithmetic for the LoRA part of linear layers and of the output head."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._tokens = self._requests = _Batch(frozenset(), None)
        self._joined: dict[int, _Joined] = {}

    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, *args: Any, **more: Any
    ) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, *args, **more)
        self._tokens = _batch(self.token_lora_indices, max_loras)
        self._requests = _batch(self.sampler_indices, max_loras)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add the adapters' part to `y` (tokens × outputs), whose columns are those of several layers for packed ones
        (`output_slices`); `x` is tokens × inputs. Weights are slots × 1 × rank × inputs, slots × 1 × outputs × rank.
        """
        self._add(y, x, lora_a_stacked, lora_b_stacked, scale, self._tokens)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        """The same for the logits `y` (requests × vocabulary), which may be padded, or have fewer columns than the
        head has outputs, and hidden states `x`."""
        width = lora_b_stacked.shape[-2]
        self._add(y[..., :width], x, (lora_a_stacked,), (lora_b_stacked,), scale, self._requests)

    def _add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: tuple[torch.Tensor, ...],
        b: tuple[torch.Tensor, ...],
        scale: float,
        batch: _Batch,
    ) -> None:
        if not batch.slots:
            return
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        layer = self._layer(a, b)
        if slots := batch.slots & layer.used:
            first, end, ranks = min(slots), max(slots) + 1, layer.a.shape[1]
            inner = x.to(layer.a.dtype) @ layer.a[first:end].flatten(0, 1).T
            if batch.others is not None:
                inner.view(-1, end - first, ranks).masked_fill_(batch.others[:, first:end, None], 0)
            outer = layer.b[: y.shape[1], first * ranks : end * ranks].T
            if y.dtype == outer.dtype:
                y.addmm_(inner, outer, alpha=scale)
            else:
                y.add_(inner @ outer, alpha=scale)
        for slot in batch.slots & layer.not_finite:
            y[slice(None) if batch.others is None else ~batch.others[:, slot]] = torch.nan

    def _layer(self, a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> _Joined:
        """All adapters of a layer, joined again when vLLM has written another one into the stacked tensors."""
        stacked = (*a, *b)
        versions = tuple(each._version for each in stacked)
        known = self._joined.get(id(a[0]))
        if known is not None and known.versions == versions:
            return known
        all_a = torch.cat([each.squeeze(1) for each in a], dim=1)
        all_b = torch.stack(
            [torch.block_diag(*parts) for parts in zip(*(each.squeeze(1) for each in b), strict=True)]
        )
        broken = ~(all_a.isfinite().flatten(1).all(1) & all_b.isfinite().flatten(1).all(1))
        all_a[broken] = all_b[broken] = 0
        used = all_a.flatten(1).any(1) & all_b.flatten(1).any(1)
        joined = _Joined(stacked, versions, all_a, torch.cat([*all_b], dim=1), _slots(used), _slots(broken))
        self._joined[id(a[0])] = joined
        return joined


def _slots(which: torch.Tensor) -> frozenset[int]:
    return frozenset(which.nonzero().flatten().tolist())


def _batch(indices: torch.Tensor, slots: int) -> _Batch:
    """`indices`: each row's slot; -1: the base model."""
    found = torch.unique(indices).tolist()
    others = None if len(found) == 1 else indices[:, None] != torch.arange(slots)
    return _Batch(frozenset(slot for slot in found if slot >= 0), others)


def agrees(ours: type[Any]) -> bool:
    """Whether a class gives the same numbers as vLLM's own where those are right, and leaves rows of the base model
    as they are.

    Compared are prefill and decoding, float32 and bfloat16, layers of one and of several parts, and the output head,
    with adapters of two ranks, of which one is in the last slot.
    """
    return all(
        _agree(ours, mapping, is_prefill, dtype)
        for mapping in ((1, 1, 0, 3, 0, 1), (3, 3, 3, 3, 3, 3), (0, 0, 0, 0, 0, 0))
        for is_prefill in (True, False)
        for dtype in (torch.float32, torch.bfloat16)
    )


def _agree(ours: type[Any], mapping: tuple[int, ...], is_prefill: bool, dtype: torch.dtype) -> bool:
    slots: list[int | None] = [1, None, 3]
    made = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(dtype)

    inputs, rank, widths = 16, 8, (12, 4)
    a = tuple(draw(len(slots), 1, rank, inputs) for _ in widths)
    b = tuple(draw(len(slots), 1, width, rank) for width in widths)
    for each in a:
        each[0, :, rank // 2 :] = 0  # An adapter of a smaller rank than the server takes.
    x, y, logits = draw(len(mapping), inputs), draw(len(mapping), sum(widths)), draw(len(mapping), widths[0] + 3)

    def computed(wrapper: type[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        it = wrapper(len(mapping), len(mapping), torch.device("cpu"))
        it.update_metadata(LoRAMapping(mapping, mapping, is_prefill=is_prefill), slots, len(slots), 0)
        linear, head = y.clone(), logits.clone()
        it.add_lora_linear(linear, x, a, b, 0.5, widths)
        it.add_lora_logits(head, x, a[0], b[0], 0.5)
        return linear, head

    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    base = torch.tensor(mapping) == 0
    return all(
        torch.equal(mine[base], before[base])
        and torch.allclose(mine[~base].float(), own[~base].float(), rtol=tolerance, atol=tolerance)
        for before, mine, own in zip((y, logits), computed(ours), computed(PunicaWrapperCPU), strict=True)
    )
