"""Encoders of sentence-transformers: loading one, and the vectors of queries and tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from flywheel.errors import ConfigError
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
