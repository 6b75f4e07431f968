"""What a model directory holds: its safetensors files, their headers, and reading one tensor.

The format is read directly: 8 bytes little-endian header length, a JSON header of name, dtype,
shape and byte range, then the data. The safetensors library would map the files, and mapped pages
count as resident beside the parameters they are copied to; here a tensor's bytes go straight into
a parameter's own memory, so that loading needs one copy of the model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# Codes of the dtypes that plain weights come in; all others are packed or quantised formats.
WEIGHT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies on disk."""

    file: Path
    """The safetensors file that holds it."""
    dtype_code: str
    """The format's name of its dtype; readable are those in WEIGHT_DTYPES."""
    shape: tuple[int, ...]
    """Its shape."""
    offset: int
    """Its first byte, from the file's beginning."""
    num_bytes: int
    """Its length in bytes."""


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """All tensors of the model directory `path`, by name; reads no tensor data.

    Uses model.safetensors, else the shards that model.safetensors.index.json names. Raises
    ModelLoadError where there is neither, a shard is missing, or a file is cut short or malformed.
    """
    if (path / _SINGLE_FILE).is_file():
        return _read_header(path / _SINGLE_FILE)
    if not (path / _INDEX_FILE).is_file():
        raise ModelLoadError(_nothing_to_load(path))
    shard_of = _read_index(path / _INDEX_FILE)
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        for name, tensor in _read_header(path / shard).items():
            if shard_of.get(name, shard) == shard:
                stored[name] = tensor
    return stored


def stored_dtype(path: Path) -> torch.dtype | None:
    """Dtype of the first floating tensor of the model directory `path`, from headers only; None
    where no tensor is of a plain floating dtype."""
    for tensor in sorted(read_headers(path).values(), key=lambda t: (t.file, t.offset)):
        if tensor.dtype_code in WEIGHT_DTYPES:
            return WEIGHT_DTYPES[tensor.dtype_code]
    return None


def read_into(stored: StoredTensor, target: Tensor) -> None:
    """Copy a stored tensor into `target`, converting dtype and device as needed.

    `target` has the stored shape or one that it broadcasts to.
    """
    dtype = WEIGHT_DTYPES[stored.dtype_code]
    in_place = (
        target.device.type == "cpu"
        and target.dtype == dtype
        and tuple(target.shape) == stored.shape
        and target.is_contiguous()
    )
    data = target if in_place else torch.empty(stored.shape, dtype=dtype)
    _read_bytes(stored, data)
    if not in_place:
        target.copy_(data)


def _read_bytes(stored: StoredTensor, data: Tensor) -> None:
    """Fill the contiguous CPU tensor `data` from the file."""
    remaining = data.detach().reshape(-1).view(torch.uint8).numpy().data
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.offset)
        while remaining:  # one call reads at most 2 GiB
            count = file.readinto(remaining)
            if not count:
                raise ModelLoadError(f"{stored.file} ended while it was read: was it changed?")
            remaining = remaining[count:]


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            data_start = 8 + header_bytes
            file_bytes = file.stat().st_size
            if header_bytes > _MAX_HEADER_BYTES or data_start > file_bytes:
                raise ValueError(f"its header would end at byte {data_start} of {file_bytes}")
            header = json.loads(opened.read(header_bytes))
        tensors = {
            name: _stored_tensor(file, entry, data_start)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ModelLoadError(f"{file} can't be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{file} isn't a whole safetensors file ({error}): it may be cut short or a Git LFS "
            "pointer; download it again"
        ) from error
    end = max((t.offset + t.num_bytes for t in tensors.values()), default=data_start)
    if end != file_bytes:
        raise ModelLoadError(
            f"{file} has {file_bytes} bytes where its header describes {end}: it is cut short or "
            "damaged; download it again"
        )
    return tensors


def _stored_tensor(file: Path, entry: dict[str, Any], data_start: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    code = str(entry["dtype"])
    if not (0 <= start <= end and all(size >= 0 for size in shape)):
        raise ValueError(f"negative size in {entry}")
    if code in WEIGHT_DTYPES and end - start != math.prod(shape) * WEIGHT_DTYPES[code].itemsize:
        raise ValueError(f"byte range doesn't match shape in {entry}")
    return StoredTensor(
        file=file,
        dtype_code=code,
        shape=shape,
        offset=data_start + start,
        num_bytes=end - start,
    )


def _read_index(index: Path) -> dict[str, str]:
    """Shard file of each tensor name; every shard exists."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shard_of = {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} can't be read as a safetensors index: {error!r}") from error
    shards = sorted(set(shard_of.values()))
    if foreign := [shard for shard in shards if "/" in shard or "\\" in shard]:
        raise ModelLoadError(f"{index} names files outside its directory: {', '.join(foreign)}")
    if missing := [shard for shard in shards if not (index.parent / shard).is_file()]:
        raise ModelLoadError(
            f"{index} names missing files: {', '.join(missing[:10])} ({len(missing)} of "
            f"{len(shards)}); complete the download"
        )
    return shard_of


def _nothing_to_load(path: Path) -> str:
    if not path.is_dir():
        return f"{path} isn't a directory with a Hugging Face model"
    names = sorted(file.name for file in path.iterdir())
    if pickles := [name for name in names if name.endswith(_PICKLE_SUFFIXES)]:
        return (
            f"{path} holds only pickled weights ({', '.join(pickles[:10])}), which can run code "
            "when read and are refused: convert them with "
            "transformers' from_pretrained(...).save_pretrained(...), which writes safetensors"
        )
    return f"{path} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}; found: {', '.join(names[:10])}"
