"""Compares an adapter with the layers of a base model, by their names as vLLM maps them, and by their shapes.

vLLM 0.32 leaves out matrices whose names fit no layer, and answers with the base model, without a word. The base
model is built on torch's meta device, without weights. Runs in vLLM's API server, where transformers is loaded, and
as a process of an interpreter that has it: `python -P -m flywheel.serving.base_layers`, with JSON on standard input.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from flywheel.serving.adapter_files import CONFIG_FILE, WEIGHTS_FILE, header_of, most_rank

_MATRIX: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_(?:embedding_)?([AB])(?:\.weight)?)")
_NAMES_OF_EXPERTS: Final = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
"""Names of an expert's layers in adapters, where experts have numbers."""


class UnknownLayersError(Exception):
    """The base model cannot be built; the message says why."""


class Layer(NamedTuple):
    """The sides of a layer, or of those of `experts` alike whose matrices in an adapter are one behind the other."""

    outputs: int
    inputs: int
    experts: int = 1


def why_misfit(base: str, folder: Path, *, must_be_finite: bool = False) -> str:
    """Why the matrices of the adapter in a folder do not fit the layers of a base model; empty if they do. Raises
    UnknownLayersError."""
    _layers(base)  # first: without them nothing is compared
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        rank, patterns = most_rank(config), config.get("rank_pattern")
        shapes: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for tensor, entry in header_of(folder / WEIGHTS_FILE)[1].items():
            if found := _MATRIX.fullmatch(tensor):  # vLLM itself refuses other tensors.
                shapes[found[1]][found[3]] = entry["shape"]
                if len(entry["shape"]) != 2:
                    return f"{tensor} is {entry['shape']}, and no matrix"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        return f"{folder} holds no readable adapter ({type(error).__name__}: {error})"
    if not shapes:
        return f"{folder} holds no matrix of an adapter"
    for name, pair in shapes.items():
        if (layer := layer_of(base, name)) is None:
            return f"{base} has no layer {name}: vLLM would leave its matrices out"
        if pair.keys() != {"A", "B"}:
            return f"of {name} it has no lora_{'B' if 'A' in pair else 'A'}"
        (own, inputs), (outputs, other) = pair["A"], pair["B"]
        most = rank * layer.experts
        is_rank = own == other and own % layer.experts == 0 and (0 < own <= most if patterns else own == most)
        if (outputs, inputs) != layer[:2] or not is_rank:
            wanted = f"{[layer.outputs, layer.inputs]}" + f" of {layer.experts} experts" * (layer.experts > 1)
            return (
                f"its lora_A is {pair['A']} and lora_B {pair['B']}, of rank {rank}, and {name} of {base} is {wanted}"
            )
    return _why_not_finite(folder) if must_be_finite else ""


def layer_of(base: str, name: str) -> Layer | None:
    """The layer to which vLLM adds the matrices of this name. Raises UnknownLayersError."""
    layers = _layers(base)
    if name in layers:
        return layers[name]
    # Only here, because it loads vLLM's class of the model: names of an older version, or of vLLM's own.
    renamed, by_name = _renamed(base)
    return by_name.get(renamed(name))


@functools.lru_cache(maxsize=2)
def _layers(base: str) -> dict[str, Layer]:
    """The layers by the names that they have in transformers, and that adapters by PEFT have."""
    try:
        import torch
        import transformers

        # A model's own code could do anything. Its type of numbers would be that of all threads for a moment.
        config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
        config.dtype = torch.get_default_dtype()
        kind = getattr(transformers, next(iter(config.architectures or []), ""), None)
        with torch.device("meta"):
            model = kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
        return {found: layer for name, module in model.named_modules() for found, layer in _of_module(name, module)}
    except Exception as error:  # whatever the class of a model raises
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise UnknownLayersError(f"{base} cannot be built: {why}") from error


def _of_module(name: str, module: Any) -> Iterator[tuple[str, Layer]]:
    parameters = dict(module.named_parameters(recurse=False))
    if (weight := parameters.get("weight")) is not None and weight.ndim == 2:
        is_turned = type(module).__name__ in ("Conv1D", "Embedding")
        yield name, _layer(weight.shape, is_turned)
    first = next((parameters[key] for key in ("gate_up_proj", "up_proj") if key in parameters), None)
    last = parameters.get("down_proj")
    if first is None or last is None or first.ndim != 3 or last.ndim != 3:
        return
    # PEFT's `target_parameters` wraps a module of experts twice; vLLM takes the inner matrices for the first layer.
    is_turned = getattr(module, "is_transposed", False)
    into, out = (_layer(each.shape[1:], is_turned)._replace(experts=len(each)) for each in (first, last))
    yield f"{name}.base_layer", into
    yield name, out
    hidden, inner = out[:2]
    for number in range(out.experts):
        for names, layer in zip(_NAMES_OF_EXPERTS, [Layer(inner, hidden)] * 2 + [Layer(hidden, inner)], strict=True):
            yield from ((f"{name}.{number}.{each}", layer) for each in names)


def _layer(sides: Sequence[int], is_turned: bool) -> Layer:
    outputs, inputs = reversed(sides) if is_turned else sides
    return Layer(outputs, inputs)


@functools.lru_cache(maxsize=2)
def _renamed(base: str) -> tuple[Callable[[str], str | None], dict[str | None, Layer]]:
    """How vLLM's class of the model renames layers, and the layers by these names."""
    try:
        from transformers import AutoConfig
        from vllm.model_executor.models.registry import ModelRegistry

        [architecture, *_] = AutoConfig.from_pretrained(base, trust_remote_code=False).architectures
        mapper = getattr(ModelRegistry.models[architecture].load_model_cls(), "hf_to_vllm_mapper", None)
    except Exception as error:  # without vLLM, and for a model that it does not have or whose packages are missing
        why = f"{type(error).__name__}: {error}"
        raise UnknownLayersError(f"how vLLM names the layers of {base} cannot be told ({why})") from error

    def renamed(name: str) -> str | None:
        end = ".lora_A.weight"
        found: str | None = mapper.get_rename_mapper().map_name(name + end) if mapper else name + end
        return found and found.removesuffix(end)

    return renamed, {renamed(name): layer for name, layer in _layers(base).items()}


def _why_not_finite(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            if not file.get_tensor(name).float().isfinite().all():
                return f"{name} has values that are not finite"
    return ""


def compared(request: Mapping[str, str]) -> dict[str, str]:
    """Why the adapter in the folder `adapter` cannot be served with the model `base`, or why that cannot be told."""
    why = unknown = ""
    try:
        why = why_misfit(request["base"], Path(request["adapter"]), must_be_finite=True)
    except UnknownLayersError as error:
        unknown = str(error)
    return {"why": why, "unknown": unknown}


def main() -> None:
    # Whatever else is printed must not be taken for the answer.
    with contextlib.redirect_stdout(sys.stderr):
        answer = compared(json.load(sys.stdin))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
