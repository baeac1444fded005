"""Encoders of sentence-transformers: loading one, and the vectors of queries and tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np

from flywheel.errors import ConfigError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

INSTALL: Final = "Install them: pip install 'agentscope-flywheel[retrieval]'."


def load_model(name: str | os.PathLike[str]) -> SentenceTransformer:
    """The model in a directory, or of that name on a hub, in float32. A model without a pooling of its own gets the
    mean of its tokens. Raises ConfigError."""
    attempted = f"load the encoder {os.fspath(name)}"
    sentence_transformers = installed(attempted)
    try:
        model: SentenceTransformer = sentence_transformers.SentenceTransformer(
            str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else os.fspath(name),
            model_kwargs={"dtype": "float32"},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Name a directory that sentence-transformers loads, or a model of a hub that can be reached."
        raise ConfigError(attempted, " ".join(str(error).split())[:300], hint) from error
    return model


def installed(attempted: str) -> ModuleType:
    """The module `sentence_transformers`. Raises ConfigError."""
    try:
        import sentence_transformers
        from transformers.utils import logging as transformers_log
    except ImportError as error:
        raise ConfigError(attempted, f"the package {error.name} is not installed", INSTALL) from error
    transformers_log.disable_progress_bar()
    module: ModuleType = sentence_transformers
    return module


def query_vectors(model: SentenceTransformer, texts: Sequence[str]) -> np.ndarray:
    """Vectors of length 1, with the prompt that the model has for queries; float32 of shape (texts, dimensions)."""
    return np.asarray(model.encode_query(list(texts), normalize_embeddings=True, show_progress_bar=False), np.float32)


def tool_vectors(model: SentenceTransformer, texts: Sequence[str]) -> np.ndarray:
    """The same, with the prompt for documents."""
    return np.asarray(
        model.encode_document(list(texts), normalize_embeddings=True, show_progress_bar=False), np.float32
    )
