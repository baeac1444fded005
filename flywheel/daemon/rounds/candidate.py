"""Adapters that another trainer made: copied, checked, and their training data compared with the held-out tasks.

The checks read configurations and the headers of safetensors, and have the trainer's interpreter compare the adapter
with the layers of the base model.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, get_args

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.training import UNTRAINABLE, LoraSettings
from flywheel.daemon.rounds.file_tasks import rows
from flywheel.errors import ConfigError, TrainError
from flywheel.records.round import CANDIDATE_DIR, CANDIDATE_FILE, Candidate
from flywheel.records.similarity import beginning_of, first_question
from flywheel.serving.adapter_files import CONFIG_FILE, PICKLED, WEIGHTS_FILE, header_of, most_rank, why_unloadable
from flywheel.serving.server.model_parsers import folder_of
from flywheel.sources.jsonl.data_set import DataSet, answer_of, trainer_python
from flywheel.store.splits import held_out_alike
from flywheel.system.files import make_private, sync, tree_sha256, write_json
from flywheel.system.terminal import quantity
from flywheel.training.engine.policy import adapter_of_checkpoint

UNKNOWN: Final = "held-out exposure unknown"
RANKS: Final = get_args(LoraSettings.model_fields["r"].annotation)
SHOWN: Final = 3
"""Held-out tasks that an error names."""
_UNSERVED: Final = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "use_qalora",
    "use_bdlora", "alora_invocation_tokens",
)  # fmt: skip
"""Keys of PEFT's configuration that vLLM 0.32 refuses (`PEFTHelper`). It serves `use_rslora`, `rank_pattern` and
`alpha_pattern`."""
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Of `init_lora_weights`; others, such as PiSSA, change the base model's weights."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """How the conversations in the data of another trainer begin."""

    path: Path
    lines: int
    beginnings: frozenset[int]
    questions: frozenset[str]

    @classmethod
    def read(cls, path: Path, config: Config) -> Self:
        """Of a data set as `flywheel train --data` takes it. Raises ConfigError."""
        found = rows([DataSet.of(path)], "--trained-on", config, trainer_python(None))
        begun = [(beginning_of(row.task), first_question(row.task["prompt"])) for _, row in found]
        if not begun:
            raise ConfigError(
                f"read --trained-on {path}", "it is empty", "Name the data that the adapter was trained on."
            )
        beginnings = frozenset(beginning for beginning, _ in begun)
        return cls(path, len(begun), beginnings, frozenset(question for _, question in begun))

    def exposure(self, conn: Connection, attempted: str) -> str:
        """That no held-out conversation is in it. Raises TrainError otherwise."""
        found = held_out_alike(conn, self.beginnings, self.questions)
        if not found:
            return f"no held-out conversation is in its training data, {self.path} ({quantity(self.lines, 'line')})"
        named = ", ".join(found[:SHOWN]) + (", …" if len(found) > SHOWN else "")
        raise TrainError(
            attempted,
            f"contamination: {quantity(len(found), 'held-out task')} of the gate begin like conversations in its"
            f" training data, {self.path}: {named}",
            "Train it without them: `flywheel export` writes only training tasks.",
        )


def take(
    folder: Path, stage: Path, config: Config, exposure: str, data: TrainingData | None, attempted: str
) -> Candidate:
    """Copy the adapter in a folder to the folder `stage`, and check it. The copy names `model.base` as its base
    model, whatever path the other trainer had. Raises TrainError for one that cannot be served."""
    copy, base = stage / CANDIDATE_DIR, config.model.base
    try:
        # One may be left of a command that was killed.
        shutil.rmtree(stage, ignore_errors=True)
        make_private(stage)
        for why, hint in _missing(folder):
            raise TrainError(attempted, why, hint)
        adapter_of_checkpoint(folder, copy)
        made, (_, tensors) = json.loads((copy / CONFIG_FILE).read_bytes()), header_of(copy / WEIGHTS_FILE)
        for why, hint in _unserved(made, tensors):
            raise TrainError(attempted, why, hint)
        write_json(copy / CONFIG_FILE, {"lora_dropout": 0.0, **made, "base_model_name_or_path": base})
        if why := why_unloadable(copy, base_model=base, max_rank=config.serving.max_lora_rank):
            raise TrainError(attempted, why, "Save the adapter again, or serve with a higher serving.max_lora_rank.")
        about = _base_model(str(made.get("base_model_name_or_path") or ""), base, copy, attempted)
        fields = {"source": str(folder), "base": about, "exposure": exposure}
        taken = Candidate(
            name=copy.name,
            path=str(copy),
            sha256=tree_sha256(copy),
            trained_on="" if data is None else str(data.path),
            **fields,
        )
        write_json(stage / CANDIDATE_FILE, taken.model_dump(exclude={"name", "path"}))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        why = f"it holds no adapter that can be copied and read ({type(error).__name__}: {error})"
        raise TrainError(attempted, why, "Correct that, and start the round again.") from error
    return taken


def place(stage: Path, directory: Path) -> None:
    """Move the copy to the directory of its round."""
    make_private(directory)
    shutil.rmtree(directory / CANDIDATE_DIR, ignore_errors=True)
    for name in (CANDIDATE_DIR, CANDIDATE_FILE):
        (stage / name).rename(directory / name)
    sync(directory)


def candidate_in(directory: Path, name: str) -> Candidate:
    """The adapter that the round of this name and directory compares. Raises TrainError."""
    path = directory / CANDIDATE_FILE
    try:
        return Candidate(name=name, path=str(directory / CANDIDATE_DIR), **json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        why = f"{path} cannot be read: {error}"
        raise TrainError(f"start {name}", why, "Start another round with the adapter.") from None


def _missing(folder: Path) -> Iterator[tuple[str, str]]:
    """Why a folder has no files of an adapter, and what to do."""
    hint = "Name the folder that PEFT has saved the adapter in, perhaps a checkpoint."
    if not folder.is_dir():
        yield "there is no such folder", hint
    has_config = (folder / CONFIG_FILE).is_file()
    if not has_config and ((folder / "config.json").exists() or any(folder.glob("model*.safetensors"))):
        yield "it holds a whole model, not a LoRA adapter", "Save the adapter alone, by PEFT and before it is merged."
    if not has_config:
        yield f"it has no {CONFIG_FILE}", hint
    if (folder / WEIGHTS_FILE).is_file():
        return
    for path in sorted(folder.glob("adapter_model*")):
        if path.suffix in PICKLED:
            why = f"its weights are in {path.name}, a format that can run code when it is loaded"
            yield why, "Save them as safetensors: save_pretrained(…, safe_serialization=True)."
    yield f"it has no {WEIGHTS_FILE}", hint


def _unserved(made: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why vLLM would not answer with an adapter as it was trained, and what to do."""
    if (kind := made.get("peft_type", "LORA")) != "LORA":
        yield f"its peft_type is {kind}, and only LoRA is served", "Train a LoRA adapter."
    if (rank := most_rank(made)) not in RANKS:
        ranks = ", ".join(map(str, RANKS))
        yield f"its rank is {rank}, and vLLM supports {ranks}", "Train it with one of these ranks."
    bias, init, targets = made.get("bias") or "none", made.get("init_lora_weights"), made.get("target_modules")
    if targets is None and made.get("target_parameters"):
        targets = []
    if not isinstance(targets, str | list):
        yield (
            f"target_modules in its {CONFIG_FILE} is {json.dumps(targets)}, which names no layer",
            "Save it with PEFT.",
        )
        return
    has = [key for key in _UNSERVED if made.get(key)]
    has += [f"bias {bias}"] * (bias != "none")
    has += [f"init_lora_weights {init}"] * (isinstance(init, str) and init.lower() not in _PLAIN_INITS)
    plain = "Train a plain LoRA adapter, without it."
    for key in has:
        yield f"its {CONFIG_FILE} has {key}, which vLLM does not serve", plain
    for layer, why in UNTRAINABLE.items():
        if any(
            layer in name.split(".") for name in (*tensors, *([targets] if isinstance(targets, str) else targets))
        ):
            yield f"it adapts {layer}: {why}", f"Train it without {layer} in target_modules."
    for name in tensors:
        if not name.endswith((".lora_A.weight", ".lora_B.weight")):
            yield f"its tensor {name} is no matrix of LoRA, and vLLM does not serve it", plain


def _base_model(named: str, base: str, adapter: Path, attempted: str) -> str:
    """What is not known of the base model that an adapter names, and of how it fits `base`; empty if nothing is.
    Raises TrainError if it is another one, or if the adapter does not fit, or if nothing says which one it is and
    that cannot be compared."""
    theirs, own = _folder(named) if named else None, _folder(base)
    is_same: bool | None = bool(named) and os.path.realpath(named) == os.path.realpath(base)
    if not is_same:
        is_same = _have_same_weights(theirs, own) if theirs and own else None
    if is_same is None and named and not Path(named).is_absolute() and not Path(base).is_absolute():
        is_same = named.casefold() == base.casefold()
    change = f"correct base_model_name_or_path in a copy of its {CONFIG_FILE}"
    if is_same is False:
        why = f"it was trained on {named}, and model.base is {base}"
        hint = f"Set model.base to its base model. If both are the same model, {change}."
        raise TrainError(attempted, why, hint)
    why, not_compared = misfit(own, adapter, attempted) if own else ("", f"{base} is not on this machine")
    if is_same:
        if why:
            raise TrainError(attempted, why, f"Train it on {base} with PEFT, and save it again.")
        return not_compared and f"its shapes were not compared with its base model: {not_compared}"
    unknown = f"its base model, {named}, is not on this machine" if named else "it names no base model"
    if why := why or not_compared:
        raise TrainError(attempted, f"{unknown}, and {why}", f"If {base} is its base model, {change}.")
    return f"{unknown}, but its matrices fit {base}"


def misfit(base: Path, adapter: Path, attempted: str) -> tuple[str, str]:
    """Why an adapter does not fit a base model, or why that cannot be told; both empty if it fits."""
    request = {"base": str(base), "adapter": str(adapter)}
    try:
        answer = answer_of(trainer_python(None), "flywheel.serving.base_layers", request, attempted)
    except TrainError as error:
        return "", error.why
    return answer["why"], answer["unknown"]


def _folder(base: str) -> Path | None:
    """The folder of a model; None if it is not on this machine."""
    path = Path(base).expanduser()
    found = path if path.is_dir() else folder_of(base)
    return found if found is not None and found.is_dir() else None


def _have_same_weights(one: Path, other: Path) -> bool | None:
    """Whether the files of weights in two folders are equal; None where one has none."""
    ours, theirs = (
        {path.name: path for path in [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]}
        for folder in (one, other)
    )
    if not ours or not theirs:
        return None
    return ours.keys() == theirs.keys() and all(
        filecmp.cmp(ours[name], theirs[name], shallow=False) for name in sorted(ours)
    )
