"""Training an encoder of sentence-transformers on rows of texts: multiple negatives ranking."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flywheel.errors import TrainError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


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
