"""Memory of HostGraph: what its graphs made, and what they only refer to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .graph import CaptureError


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_inference: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of tensor as it is now."""
        return cls(
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            size=tuple(tensor.size()),
            stride=tensor.stride(),
            is_inference=tensor.is_inference(),
        )

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A new tensor of this layout. Compiled functions guard on inference tensors."""
        with torch.inference_mode(self.is_inference):
            view = torch.empty(0, dtype=self.dtype, device=storage.device)
            return view.set_(storage, self.offset, self.size, self.stride)


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage for as long as a reference to it exists."""
    return int(tensor.untyped_storage()._cdata)


def frozen(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it lies in memory now, whatever becomes of the object."""
    return Layout.of(tensor).view(tensor.untyped_storage())


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """What nobody computes by accident: NaN, or an integer far outside any index range."""
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return int.from_bytes(b"\x5a" * dtype.itemsize, "little")


class Arena:
    """All storages that the graphs of one pool made."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._storages

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(flat.untyped_storage().nbytes() for flat in self._storages.values())

    def add(self, tensor: torch.Tensor) -> None:
        """Keep the storage of a new tensor, and poison it in its dtype from now on."""
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        flat.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))
        self._storages[storage_key(tensor)] = flat

    def poison(self, live: Iterable[int] = ()) -> None:
        """Overwrite every storage that isn't live."""
        kept = set(live)
        for key, flat in self._storages.items():
            if key not in kept:
                flat.fill_(poison_value(flat.dtype))


class ExternalTensor:
    """A tensor that a graph refers to by address and doesn't keep alive, as on CUDA.

    CUDA would read whatever lies at the address later; here resolve() raises CaptureError.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._address = storage.data_ptr()
        self._layout = Layout.of(tensor)

    def resolve(self) -> torch.Tensor:
        """The tensor, if its memory is still where it was."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        described = f"the graph uses a {self._layout.dtype} tensor of shape {self._layout.size}"
        if storage is None:
            raise CaptureError(
                f"{described} that was freed after the capture: keep static tensors, and refill "
                "them in place"
            )
        assert isinstance(storage, torch.UntypedStorage)
        if storage.data_ptr() != self._address:
            raise CaptureError(
                f"{described} whose memory has moved since the capture: static tensors must not "
                "be resized"
            )
        return self._layout.view(storage)
