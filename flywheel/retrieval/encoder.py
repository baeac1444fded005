"""Encoders of sentence-transformers: loading one, the vectors of queries and tools, and training one on rows of texts
by multiple negatives ranking."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flywheel.errors import ConfigError, TrainError
from flywheel.system import own_package
from flywheel.training.packages import missing_of

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

TRAINING: Final = ("accelerate", "bm25s", "datasets", "sentence_transformers")
"""The packages of the extra."""


def require(attempted: str, *packages: str) -> None:
    """Raises ConfigError if a package is not installed."""
    if missing := missing_of(packages):
        why = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise ConfigError(attempted, why, f"Run: pip install {own_package.requirement('retrieval')}.")


def load_model(name: str | os.PathLike[str]) -> SentenceTransformer:
    """The model in a directory, or of that name on a hub, in float32. For a model without a pooling of its own,
    sentence-transformers chooses one. Raises ConfigError."""
    attempted = f"load the encoder {os.fspath(name)}"
    require(attempted, "sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_log

    transformers_log.disable_progress_bar()
    folder = Path(name).expanduser()
    try:
        return SentenceTransformer(str(folder if folder.is_dir() else name), model_kwargs={"dtype": "float32"})
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Name a directory that sentence-transformers loads, or a model of a hub that can be reached."
        raise ConfigError(attempted, " ".join(str(error).split())[:300], hint) from error


def query_vectors(model: SentenceTransformer, texts: Sequence[str]) -> np.ndarray:
    """Vectors of length 1, with the prompt that the model has for queries; float32 of shape (texts, dimensions)."""
    return np.asarray(model.encode_query(list(texts), normalize_embeddings=True, show_progress_bar=False), np.float32)


def tool_vectors(model: SentenceTransformer, texts: Sequence[str]) -> np.ndarray:
    """The same, with the prompt for documents."""
    return np.asarray(
        model.encode_document(list(texts), normalize_embeddings=True, show_progress_bar=False), np.float32
    )


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 2e-5
    seed: int = 42


def train(model: SentenceTransformer, rows: Sequence[dict[str, str]], options: EncoderOptions) -> None:
    """Train the model in place on the rows of `training_rows`. On a CPU, the same rows and options give the same
    weights.

    Each query is compared with its tool, its hard negatives, and the tools of the other rows of its batch (Henderson
    and others 2017). A batch has no text twice, since a tool that is right for one query would be wrong for another.
    Raises TrainError.
    """
    import datasets
    import torch
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.training_args import (
        BatchSamplers,
        SentenceTransformerTrainingArguments,
    )
    from transformers import PrinterCallback

    datasets.disable_progress_bars()
    columns = list(rows[0])
    prompts = {name: model.prompts.get("query" if name == "anchor" else "document") for name in columns}
    with tempfile.TemporaryDirectory(prefix="flywheel-encoder-") as work:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=work,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            warmup_steps=0.1,
            batch_sampler=BatchSamplers.NO_DUPLICATES,
            prompts={name: text for name, text in prompts.items() if text} or None,
            seed=options.seed,
            data_seed=options.seed,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(list(rows)),
            loss=MultipleNegativesRankingLoss(model),
        )
        # It prints figures to stdout, where a report may be asked for.
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except (RuntimeError, MemoryError) as error:
            why = " ".join(str(error).split())[:300]
            hint = "Try a smaller --batch-size or fewer --negatives."
            raise TrainError("train the encoder", why, hint) from error


def architecture_of(model: SentenceTransformer) -> str:
    """The name of its transformer's class; empty for a model without one."""
    transformer: Any = getattr(model[0], "auto_model", None)
    return type(transformer).__name__ if transformer is not None else ""
