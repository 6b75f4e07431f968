"""One host buffer per step, laid out anew each step and copied to the device in one go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of one array on the device, for what comes seldom; the host doesn't wait for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


Fields: TypeAlias = Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
"""Name of each field to its numpy type and shape."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the fields of one step lie in the buffer."""

    host: dict[str, np.ndarray]
    """Writable views of the host buffer."""
    offsets: dict[str, int]
    """Bytes from the start of the buffer."""
    num_bytes: int
    """Bytes in use."""


class StagingBuffer:
    """Packs arrays of several types into one transfer.

    On a CPU the device views are the host views, and nothing is copied. On CUDA the host buffer
    is pinned and `lay_out` first waits for the last copy out of it, which has long been done
    unless the host runs ahead. Steps of the same shapes, as decode steps mostly are, share one
    layout and its views.

    Views handed out are valid until the next `lay_out`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None
        self._fields: Fields = {}
        self._layout = Layout(host={}, offsets={}, num_bytes=0)
        self._views: dict[str, torch.Tensor] | None = None  # of the layout, on a CPU
        self._grow(1 << 16)

    def lay_out(self, fields: Fields) -> Layout:
        """Reserve room for `fields`; the contents are undefined."""
        if self._copied is not None:
            self._copied.synchronize()  # sync: the last copy still reads this buffer
        if fields != self._fields:
            self._layout = self._new_layout(fields)
            self._fields = dict(fields)
            self._views = None
        return self._layout

    def _new_layout(self, fields: Fields) -> Layout:
        offsets, end = {}, 0
        for name, (dtype, shape) in fields.items():
            offsets[name] = end
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._bytes):
            self._grow(2 * end)
        host = {
            name: np.ndarray(shape, dtype=dtype, buffer=self._bytes, offset=offsets[name])
            for name, (dtype, shape) in fields.items()
        }
        return Layout(host=host, offsets=offsets, num_bytes=end)

    def upload(self, layout: Layout) -> dict[str, torch.Tensor]:
        """Device tensors of all fields, by one copy that the host doesn't wait for."""
        assert layout is self._layout, "another layout was made since"
        if self._device.type == "cpu":
            if self._views is None:
                self._views = {name: torch.from_numpy(a) for name, a in layout.host.items()}
            return self._views
        device_bytes = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
        device_bytes.copy_(self._host[: layout.num_bytes], non_blocking=True)
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
        tensors = {}
        for name, array in layout.host.items():
            start = layout.offsets[name]
            dtype = torch.from_numpy(array[:0]).dtype
            part = device_bytes[start : start + array.nbytes]
            tensors[name] = part.view(dtype).view(array.shape)
        return tensors

    def _grow(self, num_bytes: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._bytes = self._host.numpy()


class StagingRing:
    """Staging buffers that steps take in turns, so that those in flight keep their views.

    Args:
        device: as of `StagingBuffer`.
        depth: steps that may be in flight at a time, the one being packed included.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self._turns = itertools.cycle([StagingBuffer(device) for _ in range(depth)])

    def next(self) -> StagingBuffer:
        """The one whose turn it is: its last step has ended."""
        return next(self._turns)
