"""A GGUF file opened for reading: typed metadata, and tensors that stay on disk until read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Value = TypeVar("Value", bool, int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor of a file, still in the file's encoding."""

    name: str
    """Name in the file, such as blk.0.attn_q.weight."""

    encoding: str
    """ggml's name of the encoding: F32, F16, BF16, Q4_1, ..."""

    shape: tuple[int, ...]
    """In elements, row-major: a projection is (out_features, in_features)."""

    data: npt.NDArray[Any]
    """[rows, encoded row] view of the mapped file; a vector is one row."""

    def decode(self, rows: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Decode some rows to float32 [len(rows), columns], in the order asked for.

        ggml's blocks never cross rows, so rows can be picked and reordered while still encoded.
        """
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            decoded = dequantize(self.data[rows], GGMLQuantizationType[self.encoding])
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {self.name} is encoded as {self.encoding}, which the gguf package can't "
                "decode; use another quantisation of this model"
            ) from error
        return np.asarray(decoded, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Metadata and tensors of one file."""

    path: Path
    """Where it was read from."""

    metadata: Mapping[str, Any]
    """Keys as in the file, values as Python values."""

    tensors: Mapping[str, GgufTensor]
    """By name."""

    def get(self, key: str, kind: type[Value]) -> Value | None:
        """Value of a metadata key, or None where the file has no such key; a wrong type raises."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelLoadError(
                f"{self.path}: {key} is {_shorten(value)}, but must be {kind.__name__}"
            )
        return value

    def require(self, key: str, kind: type[Value]) -> Value:
        """Value of a metadata key that must be there."""
        value = self.get(key, kind)
        if value is None:
            raise ModelLoadError(f"{self.path} lacks the metadata key {key}")
        return value

    def require_list(self, key: str, kind: type[Value]) -> list[Value]:
        """List under a metadata key that must be there, every element of one type."""
        values = self.metadata.get(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ModelLoadError(
                f"{self.path}: {key} must be a list of {kind.__name__}, but is {_shorten(values)}"
            )
        return values


def open_gguf(path: Path) -> GgufFile:
    """Read a file's header and map its tensors; a damaged or split file is a ModelLoadError."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError, TypeError, OSError) as error:
        raise ModelLoadError(
            f"{path} can't be read as a GGUF file, it may be truncated or damaged: {error}"
        ) from error
    if reader.byte_order != "I":
        raise UnsupportedModelError(f"{path} has the byte order of another kind of machine")
    file = GgufFile(
        path=path,
        metadata=metadata,
        tensors={tensor.name: _tensor(tensor) for tensor in reader.tensors},
    )
    parts = file.get("split.count", int) or 0
    if parts > 1:
        raise UnsupportedModelError(
            f"{path} is one of {parts} parts of a split model; merge them into one file first "
            "(llama-gguf-split --merge)"
        )
    return file


def _tensor(tensor: Any) -> GgufTensor:
    import numpy as np

    data = np.atleast_1d(np.asarray(tensor.data))
    return GgufTensor(
        name=tensor.name,
        encoding=tensor.tensor_type.name,
        shape=tuple(int(size) for size in reversed(tensor.shape)),
        data=data.reshape(-1, data.shape[-1]) if data.size else data.reshape(0, 1),
    )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
