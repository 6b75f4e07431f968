"""Model directories: complete safetensors files are read, everything else is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from runtime.errors import ModelLoadError
from runtime.models import DecoderConfig, load_decoder, stored_dtype

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    from runtime.models import Decoder

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_remedy(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    tmp_path: Path,
    name: str,
) -> None:
    make_checkpoint(LlamaConfig)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(ModelLoadError, match=f"{name}.*save_pretrained"):
        load(tmp_path)


def test_directory_without_weights_says_what_it_holds(
    make_checkpoint: Callable[..., PreTrainedModel], load: Callable[..., Decoder], tmp_path: Path
) -> None:
    make_checkpoint(LlamaConfig)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*other\.safetensors"):
        load(tmp_path)


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        load_decoder(
            DecoderConfig.from_hf(LlamaConfig()),
            tmp_path / "nowhere",
            dtype=torch.float32,
            device=CPU,
        )


def test_missing_shard_is_named(
    make_checkpoint: Callable[..., PreTrainedModel], load: Callable[..., Decoder], tmp_path: Path
) -> None:
    make_checkpoint(LlamaConfig, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(tmp_path)


def test_tensor_that_its_shard_does_not_hold_is_missing(
    make_checkpoint: Callable[..., PreTrainedModel], load: Callable[..., Decoder], tmp_path: Path
) -> None:
    make_checkpoint(LlamaConfig, max_shard_size="60KB")
    index_file = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / json.loads(index_file.read_text())["weight_map"][Q_PROJ]
    tensors = load_file(shard)
    del tensors[Q_PROJ]
    save_file(tensors or {"unused": torch.zeros(1)}, shard)
    with pytest.raises(ModelLoadError, match=f"missing: {Q_PROJ}"):
        load(tmp_path)


@pytest.mark.parametrize(
    "index, word",
    [
        ("{", "index.json"),
        ("{}", "weight_map"),
        ('{"weight_map": []}', "index.json"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "outside"),
    ],
)
def test_malformed_index_is_named(tmp_path: Path, index: str, word: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=word):
        stored_dtype(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_files_that_are_cut_short_are_named(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    tmp_path: Path,
    kept: int,
) -> None:
    make_checkpoint(LlamaConfig)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*download it again"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        (20).to_bytes(8, "little") + b"[1, 2, 3]           ",
        (20).to_bytes(8, "little") + b'{"a": {"shape": [1]}',
    ],
)
def test_files_of_another_format_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*download it again"):
        stored_dtype(tmp_path)


def test_byte_range_that_contradicts_the_shape_is_an_error(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="byte range"):
        stored_dtype(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_dtype_is_that_of_the_first_floating_tensor(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {"a": torch.zeros(3, dtype=torch.int64), "b": torch.zeros(2, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == dtype


def test_stored_dtype_is_none_without_floating_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) is None
