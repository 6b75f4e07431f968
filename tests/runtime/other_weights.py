"""What tests of sleeping and of reloading share: engines, and checkpoints that differ from another
one by their weights, or a little more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from attention.native_build import NativeBuildError, find_compiler
from runtime import LLM
from tests.runtime.stream_reading import greedy

PROMPTS = [[(11 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 7, 33, 60))]
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 32, "num_kv_blocks": 64}
try:
    find_compiler()
    HAS_COMPILER = True
except NativeBuildError:
    HAS_COMPILER = False


def make(path, **options):
    return LLM(path, **{"device": "cpu", "dtype": "float32"} | SIZES | options)


def generate(llm):
    outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
    llm.engine.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def other_weights(source: Path, target: Path, *, seed: int = 5, dtype=torch.float32) -> Path:
    """A copy of the checkpoint `source` with other random weights."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if "norm" in name:
            weight.uniform_(0.7, 1.3, generator=generator)
        else:
            weight.normal_(0, 0.2, generator=generator)
    save_weights(target, {name: weight.to(dtype) for name, weight in weights.items()})
    return target


def save_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replace the checkpoint's tensors."""
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, **changes: object) -> Path:
    """Overwrite fields of config.json."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path
