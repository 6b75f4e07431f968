"""Captured graphs on CUDA: torch.cuda.CUDAGraph behind the interface of Graph.

Importing this module touches no device; making a pool does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .graph import Graph, GraphPool

# An integer type of each width, since the array interface knows no bfloat16 or float8.
_CARRIERS = {1: ("|u1", torch.uint8), 2: ("<i2", torch.int16), 4: ("<i4", torch.int32)}
_CARRIERS |= {8: ("<i8", torch.int64)}


class CudaGraphPool(GraphPool):
    """One private memory pool of the caching allocator, and the stream all captures use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.handle = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def new_graph(self) -> CudaGraph:
        """An empty graph of this pool."""
        return CudaGraph(self)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Gradients off, on the capture stream, which waits for the caller's and is waited for.

        The caller's stream is current again afterwards even if a capture failed, where
        torch.cuda.graph leaves its own.
        """
        with torch.cuda.device(self.device), torch.inference_mode():
            outer = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(outer)
            with torch.cuda.stream(self.stream):
                yield
            outer.wait_stream(self.stream)

    def link(self, graphs: Sequence[Graph]) -> None:
        """Nothing to do: a capture never takes memory that was live when it began."""

    def num_bytes(self) -> int:
        """All of the device's memory in use, other programs' included.

        Graphs take memory beside the allocator's too, which only the driver counts. What the
        allocator holds without using it is given back first.
        """
        torch.cuda.synchronize(self.device)  # sync: only around captures
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def wait_idle(self) -> None:
        """See GraphPool.wait_idle."""
        torch.cuda.synchronize(self.device)  # sync: once for each capture between steps

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """See GraphPool.alias. The memory stays mapped as long as a graph of the pool lives."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor)
        typestr, carrier = _CARRIERS[tensor.itemsize]
        pointer = _DevicePointer(
            {
                "shape": tuple(tensor.shape),
                "strides": tuple(step * tensor.itemsize for step in tensor.stride()),
                "typestr": typestr,
                "data": (tensor.data_ptr(), False),
                "version": 3,
            }
        )
        alias = torch.as_tensor(pointer, dtype=carrier, device=tensor.device)
        return alias.view(tensor.dtype)


class CudaGraph(Graph):
    """One torch.cuda.CUDAGraph."""

    def __init__(self, pool: CudaGraphPool) -> None:
        super().__init__(pool)
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Capture what runs inside. A failure surfaces as RuntimeError, now or at the end."""
        # Other threads may allocate pinned memory meanwhile, which "global" would refuse.
        with torch.cuda.graph(
            self._graph,
            pool=self._pool.handle,
            stream=self._pool.stream,
            capture_error_mode="thread_local",
        ):
            yield

    def replay(self) -> None:
        """Queue the graph on the current stream."""
        self._graph.replay()


class _DevicePointer:
    """Memory that somebody else owns, in numba's CUDA array interface."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface
