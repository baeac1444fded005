"""A tiny BERT of random weights with a vocabulary of given words, as a base encoder where none can be downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make(folder: Path, words: Iterable[str], *, seed: int, width: int = 64, layers: int = 2) -> Path:
    """Write the model and its tokenizer to `folder`, with the mean of the tokens as the vector of a text."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = [*SPECIAL, *sorted(set(words))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=128).save_pretrained(folder)
    transformer = Transformer(str(folder))
    SentenceTransformer(modules=[transformer, Pooling(width, pooling_mode="mean")]).save(
        str(folder), create_model_card=False
    )
    return folder
