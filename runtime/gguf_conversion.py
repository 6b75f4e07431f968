"""Turns one GGUF file into a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ModelLoadError
from .gguf_config import read_config
from .gguf_file import open_gguf
from .gguf_tokenizer import GgufVocabulary, read_vocabulary, save_tokenizer
from .gguf_weights import match_tensors, stored_dtype, write_safetensors

CONVERSION_VERSION = 1
"""Part of the name of every cached conversion; raise it when the same file converts differently."""

CONVERTED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
"""Files that every finished conversion holds; others depend on the model."""


def convert_gguf(source: Path, target: Path) -> None:
    """Write config, weights and tokenizer of the GGUF file `source` into the directory `target`.

    Matrices that are all float32, or all float16, keep that type; every other file, above all a
    quantised one, becomes bfloat16. Raises UnsupportedModelError for what can't be expressed and
    ModelLoadError for a file that contradicts itself; `target` is then incomplete.
    """
    file = open_gguf(source)
    config = read_config(file)
    tensors = match_tensors(file, config)
    vocabulary = read_vocabulary(file)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise ModelLoadError(
            f"{source} has {len(vocabulary.tokens)} tokens, but {config['vocab_size']} embeddings"
        )
    token_ids = _token_ids(vocabulary)
    config |= token_ids | {"dtype": stored_dtype(file)}
    save_tokenizer(file, vocabulary, target, max_length=config["max_position_embeddings"])
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", token_ids)
    write_safetensors(target / "model.safetensors", tensors, config["dtype"])


def _token_ids(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Token ids for both config files; an absent one is null, or transformers would guess it."""
    ends = vocabulary.end_ids
    return {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": vocabulary.pad_id,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
