"""The policy that is trained: base model and LoRA adapter, loaded for the trainer and written for the engines, and
the bytes of an adapter on their way between nodes, which share no file system.

An adapter directory appears atomically and is never written again. Nothing here generates or trains.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, Final, Self

from flywheel.config.training import LoraSettings, Precision, Quantization
from flywheel.errors import TrainError
from flywheel.records.round import AdapterRef, FrozenTarget
from flywheel.serving.adapter_files import FILES, WEIGHTS_FILE, most_rank, why_unloadable
from flywheel.system import own_package
from flywheel.system.files import sync

Bytes = bytes | bytearray | memoryview
BFLOAT16_FLAGS: Final = {"avx512_bf16", "amx_bf16"}
"""Instruction sets that multiply bfloat16 faster than float32."""


def base_dtype(base: str) -> str:
    """The checkpoint's own dtype, as vLLM and transformers name it. Raises TrainError when there is no such model."""
    from transformers import AutoConfig

    try:
        dtype = AutoConfig.from_pretrained(base).dtype
    except (OSError, ValueError) as error:
        raise TrainError(
            f"load base model {base}",
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            "Set model.base to a local directory or to a model the hub client can reach.",
        ) from error
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def check_base(base: str) -> None:
    """Raise TrainError for a path without a model; names on a hub are only checked when they are loaded."""
    path = Path(base)
    if path.is_absolute() and not (path / "config.json").is_file():
        raise TrainError(
            f"load base model {base}",
            "there is no config.json" if path.is_dir() else "there is no such directory",
            "Set model.base to a model's directory or to its name on the hub.",
        )


def check_parent(parent: AdapterRef | None) -> None:
    """Raise TrainError unless the parent adapter is there and unchanged."""
    if parent is not None:
        hint = "Roll back to an adapter that exists; this one cannot be trained further."
        _check(parent, f"continue from adapter {parent.name}", hint)


def check_candidate(candidate: AdapterRef | None) -> None:
    """The same for an adapter that another trainer made, which is compared with the parent."""
    if candidate is not None:
        _check(candidate, f"compare {candidate.name}", "Start another round with the adapter.")


def check_frozen(frozen: Sequence[FrozenTarget]) -> None:
    """The same for the adapters of the targets that the round does not train."""
    for each in frozen:
        if each.adapter is not None:
            attempted = f"let the target {each.target} answer with its adapter {each.adapter.name}"
            _check(each.adapter, attempted, f"Roll {each.target} back to an adapter that exists.")


def _check(adapter: AdapterRef, attempted: str, hint: str) -> None:
    if why := why_unloadable(Path(adapter.path), sha256=adapter.sha256):
        raise TrainError(attempted, why, hint)


def rank(adapters: Iterable[AdapterRef | None], lora: LoraSettings) -> int:
    """The largest LoRA rank that the round's engines load; adapters that exist keep their own rank."""
    configs = [Path(adapter.path) / "adapter_config.json" for adapter in adapters if adapter is not None]
    return max([lora.r, *(most_rank(json.loads(config.read_text())) for config in configs)])


def other_form(parent: AdapterRef | None, lora: LoraSettings) -> str:
    """Differences between the parent's LoRA configuration and the settings; a round continues with the parent's."""
    if parent is None:
        return ""
    has = json.loads((Path(parent.path) / "adapter_config.json").read_text())
    wanted = {"r": lora.r, "alpha": lora.alpha, "dropout": lora.dropout}
    found = {"r": has["r"], "alpha": has["lora_alpha"], "dropout": has["lora_dropout"]}
    return ", ".join(f"{name} {found[name]:g}" for name, value in wanted.items() if found[name] != value)


def trainer_dtypes(base: str, precision: Precision) -> tuple[str, str]:
    """The numbers in which the trainer holds the base model, and those in which it computes. Raises TrainError."""
    import torch

    if precision != "auto":
        return precision, precision
    dtype = base_dtype(base)
    if dtype == "bfloat16" and not torch.cuda.is_available() and has_bfloat16():
        return "float32", "bfloat16"
    return dtype, dtype


def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16, as far as Linux says so."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
        return not BFLOAT16_FLAGS.isdisjoint(flags)
    return False


def check_quantization(quantization: Quantization | None, *, has_gpu: bool | None = None) -> None:
    """Raise TrainError where the trainer's base model cannot be quantised: without a GPU or without bitsandbytes.
    torch says whether there is a GPU, if it is not known."""
    if quantization is None:
        return
    if has_gpu is None:
        import torch

        has_gpu = torch.cuda.is_available()
    attempted = f"quantise the trainer's base model (model.trainer_quantization: {quantization})"
    if not has_gpu:
        hint = "Remove model.trainer_quantization, or run rounds on a GPU."
        raise TrainError(attempted, "it saves GPU memory, and there is no GPU", hint)
    if importlib.util.find_spec("bitsandbytes") is None:
        install = f"pip install {own_package.requirement('quantized')}"
        hint = f"Install it: {install}, or remove model.trainer_quantization."
        raise TrainError(attempted, "bitsandbytes is not installed", hint)


def quantization_config(quantization: Quantization, compute_dtype: str) -> Any:
    """The arguments of bitsandbytes for transformers: the method of QLoRA (arXiv 2305.14314), or LLM.int8()."""
    from transformers import BitsAndBytesConfig

    if quantization == "8bit":
        # It warns at every product of matrices that bfloat16 is cast to float16: thousands of lines a step.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        # Transformers computes in float32 otherwise.
        bnb_4bit_compute_dtype="bfloat16" if compute_dtype == "auto" else compute_dtype,
    )


@contextlib.contextmanager
def adapter_dtype_kept(model: Any) -> Iterator[None]:
    """TRL's trainers convert an adapter on a quantised base to bfloat16. After this context it has its own numbers
    again, which are float32."""
    own = [(weight, weight.data) for weight in model.parameters() if weight.requires_grad]
    yield
    for weight, data in own:
        if weight.dtype != data.dtype:
            weight.data = data.to(weight.device)


def load_base(base: str, *, dtype: str, quantization: Quantization | None) -> Any:
    """The base model. Raises TrainError where a `quantization` is not possible."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if quantization is not None:
        check_quantization(quantization)
        options["quantization_config"] = quantization_config(quantization, dtype)
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **options)


def with_adapter(model: Any, base: str, parent: Path | None, lora: LoraSettings, seed: int) -> Any:
    """A PeftModel of the base model `base` with one trainable adapter, `default`: the parent's weights, or new ones
    with no effect, which are float32 if the base is half precision. Raises TrainError where the layers of `lora` are
    not possible."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import set_seed

    set_seed(seed)
    if parent is not None:
        return PeftModel.from_pretrained(model, str(parent), is_trainable=True)
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        bias="none",
        task_type="CAUSAL_LM",
    )
    attempted = f"put an adapter on layers of {base} (training.lora.target_modules)"
    try:
        adapted = get_peft_model(model, settings)
    except ValueError as error:
        raise TrainError(attempted, str(error).strip(), "Name linear layers of this model, or all-linear.") from error
    if isinstance(adapted.get_output_embeddings(), BaseTunerLayer):
        why = "its output layer is one of them, and its adapter would not be trained"
        raise TrainError(attempted, why, "Leave the output layer out.")
    return adapted


def write_adapter(model: Any, directory: Path) -> None:
    """Write the adapter `default` where nothing outlives the process."""
    model.save_pretrained(directory, selected_adapters=["default"])
    # PEFT's model card is an empty template.
    (directory / "README.md").unlink(missing_ok=True)


def is_unchanged(adapter: Path, parent: Path | None) -> bool:
    """Whether the weights of an adapter are those that its training started from: its parent's, or those of a new
    one, which change nothing because all of its B matrices are 0."""
    import torch
    from safetensors.torch import load_file

    made = load_file(adapter / WEIGHTS_FILE)
    if parent is None:
        return not any(bool(weights.any()) for name, weights in made.items() if ".lora_B." in name)
    before = load_file(parent / WEIGHTS_FILE)
    return before.keys() == made.keys() and all(torch.equal(before[name], weights) for name, weights in made.items())


def copy_adapter(source: Path, directory: Path) -> None:
    """Copy an adapter, whose files are never written again: by links, if possible. The directory appears
    atomically."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy(source, target)

    appear(directory, lambda beside: shutil.copytree(source, beside, copy_function=link))


def adapter_of_checkpoint(checkpoint: Path, directory: Path) -> None:
    """Copy the adapter of a trainer's checkpoint, without the optimizer. The directory appears atomically."""

    def copy(beside: Path) -> None:
        beside.mkdir()
        for name in FILES:
            shutil.copy(checkpoint / name, beside)

    appear(directory, copy)


def appear(directory: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a directory beside its place, fsync its files, and rename it."""
    beside = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    write(beside)
    for path in beside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync(beside)
    beside.rename(directory)
    sync(directory.parent)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter by name, and their SHA-256."""

    contents: Mapping[str, Bytes]
    sha256: Mapping[str, str]

    @classmethod
    def of(cls, contents: Mapping[str, Bytes]) -> Self:
        return cls(contents, {name: _sha256(data) for name, data in contents.items()})

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls.of({name: (folder / name).read_bytes() for name in FILES})

    @classmethod
    def joined(cls, pieces: Iterable[tuple[str, bytes]]) -> Self:
        """Those of pieces: a file's name and the next of its bytes."""
        contents: dict[str, bytearray] = {}
        for name, data in pieces:
            contents.setdefault(name, bytearray()).extend(data)
        return cls.of(contents)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray copies such buffers once, into its object store, where whoever gets them reads them.
        return AdapterFiles, ({name: PickleBuffer(data) for name, data in self.contents.items()}, self.sha256)

    def write(self, folder: Path) -> None:
        """Make the folder. Raises TrainError if they are not what was read."""
        attempted = f"write an adapter to {folder}"
        if changed := [name for name, data in self.contents.items() if _sha256(data) != self.sha256[name]]:
            hint = "The round can be started again; check the memory of that node."
            raise TrainError(attempted, f"{', '.join(changed)} arrived changed", hint, retryable=True)
        try:
            folder.mkdir()
            for name, data in self.contents.items():
                (folder / name).write_bytes(data)
        except OSError as error:
            hint = f"Free space in {folder.parent} on that node."
            raise TrainError(attempted, error.strerror or str(error), hint, retryable=True) from error

    @contextlib.contextmanager
    def written(self, temporary: Path | None = None) -> Iterator[Path]:
        """A folder with them, in a folder for `temporary` ones. Raises TrainError."""
        with tempfile.TemporaryDirectory(prefix="fw-adapter-", dir=temporary) as parent:
            folder = Path(parent) / "adapter"
            self.write(folder)
            yield folder


def _sha256(data: Bytes) -> str:
    return hashlib.sha256(data).hexdigest()
