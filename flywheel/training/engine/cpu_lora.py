"""LoRA in vLLM on a CPU by two products per adapter in the batch, instead of one weight matrix per token.

vLLM 0.32 gathers the matrices of each token's adapter: generation with an adapter is several times slower than
without. It also reads the index -1 of requests for the base model as the last slot, so that their answers are those
of the adapter there; here their rows are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Rows = tuple[int, torch.Tensor | None]
"""A slot and the rows of the batch that use its adapter; None: all."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """An adapter's matrices for a layer, of which a packed layer (`qkv_proj`) has several parts: all `A`, and a
    matrix with all `B` on its diagonal. One large product is faster than a small one for each part."""

    stacked: tuple[torch.Tensor, ...]
    """What it was made of: kept, so that no other tensor gets the same `id`."""
    versions: tuple[int, ...]
    """How often each of `stacked` had been written."""
    matrices: tuple[torch.Tensor, torch.Tensor] | None
    """Ranks of all parts × inputs, and outputs of all parts × ranks of all parts. None: they add nothing."""


class LoraByAdapter(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's arithmetic for the LoRA part of linear layers and of the output head."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._by_token: list[Rows] = []
        self._by_request: list[Rows] = []
        self._joined: dict[tuple[int, int], _Joined] = {}

    def update_metadata(self, *args: Any, **more: Any) -> None:
        super().update_metadata(*args, **more)
        self._by_token, self._by_request = map(_rows, (self.token_lora_indices, self.sampler_indices))

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
        self._add(y, x, lora_a_stacked, lora_b_stacked, scale, self._by_token)

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
        self._add(y[..., :width], x, (lora_a_stacked,), (lora_b_stacked,), scale, self._by_request)

    def _add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: tuple[torch.Tensor, ...],
        b: tuple[torch.Tensor, ...],
        scale: float,
        by: Sequence[Rows],
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in by:
            matrices = self._matrices(a, b, slot)
            if matrices is None:
                continue
            inner = (x if rows is None else x[rows]).to(matrices[0].dtype) @ matrices[0].T
            outer = matrices[1][: y.shape[1]].T
            if rows is not None:
                y.index_add_(0, rows, (inner @ outer).to(y.dtype), alpha=scale)
            elif y.dtype == outer.dtype:
                y.addmm_(inner, outer, alpha=scale)
            else:
                y.add_(inner @ outer, alpha=scale)

    def _matrices(
        self, a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], slot: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those of the slot's adapter, made again when vLLM has written another one into the stacked tensors."""
        stacked = (*a, *b)
        versions = tuple(each._version for each in stacked)
        known = self._joined.get((id(a[0]), slot))
        if known is not None and known.versions == versions:
            return known.matrices
        joined_a = torch.cat([each[slot].view(-1, each.shape[-1]) for each in a])
        joined_b = torch.block_diag(*(each[slot].view(-1, each.shape[-1]) for each in b))
        matrices = (joined_a, joined_b) if joined_a.any() and joined_b.any() else None
        self._joined[id(a[0]), slot] = _Joined(stacked, versions, matrices)
        return matrices


def _rows(indices: torch.Tensor) -> list[Rows]:
    slots = torch.unique(indices).tolist()
    if len(slots) == 1:
        return [(slot, None) for slot in slots if slot >= 0]
    return [(slot, (indices == slot).nonzero().squeeze(1)) for slot in slots if slot >= 0]


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
