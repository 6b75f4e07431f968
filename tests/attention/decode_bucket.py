"""One bucket of captured decode attention, on steps that a test makes up.

The "model" is attention alone: its queries, keys and values are static tensors that the test
fills, and its result is what all layers gave. Whatever no step wrote stays NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attention import AttentionBackend, PagedKVCache
from graphs import GraphOptions, GraphPool, GraphRunner, Launch

NAN = float("nan")


def copy_of(cache: PagedKVCache, device: torch.device) -> PagedKVCache:
    """A copy of the pool on a device."""
    keys = tuple(tensor.to(device, copy=True) for tensor in cache.keys)
    return PagedKVCache(keys=keys, values=tuple(t.to(device, copy=True) for t in cache.values))


class DecodeBucket:
    """Decode steps of a backend, captured at some sizes.

    Args:
        backend: offers full graphs.
        pool: of the graphs.
        sizes: numbers of sequences.
        num_blocks: of the KV pool.
        max_blocks: columns of the widest block table.
        tolerance: largest absolute error of a result; None: that of the dtype.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        pool: GraphPool,
        sizes: tuple[int, ...],
        num_blocks: int,
        max_blocks: int,
        *,
        tolerance: float | None = None,
    ) -> None:
        spec = backend.spec
        self._tolerance = tolerance
        self._spec = spec
        self.cache = PagedKVCache.allocate(spec, num_blocks)
        heads = {"query": spec.num_heads, "key": spec.num_kv_heads, "value": spec.num_kv_heads}
        self._rows = {
            name: torch.zeros(max(sizes), n, spec.head_dim, dtype=spec.dtype, device=spec.device)
            for name, n in heads.items()
        }
        options = GraphOptions(
            mode="full", decode_sizes=sizes, mixed_sizes=(), max_blocks_per_seq=max_blocks
        )
        self.runner = GraphRunner(
            self._forward, backend, self.cache, options, pool, graph_support=backend
        )
        self.runner.capture()
        assert not self.runner.dropped, self.runner.dropped

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Any, rows=None):
        assert rows is None, "serve wants all rows"
        rows = {name: tensor[: len(input_ids)] for name, tensor in self._rows.items()}
        results = [attend(layer, **rows) for layer in range(self._spec.num_layers)]
        return torch.stack(results, dim=1).flatten(1)

    def serve(self, step: Any) -> tuple[Launch, torch.Tensor]:
        """Run a step of tests/attention; the launch, and its rows, padded ones included.

        Checks the results, and that no slot changed that the step doesn't write.
        """
        num_rows = len(step.query)
        for name, tensor in self._rows.items():
            tensor.fill_(NAN)
            tensor[:num_rows].copy_(getattr(step, name))
        pools = zip(
            (*self.cache.keys, *self.cache.values),
            (*step.cache.keys, *step.cache.values),
            strict=True,
        )
        for tensor, given in pools:
            tensor.fill_(NAN)
            tensor[: len(given)].copy_(given)
        before = copy_of(self.cache, torch.device("cpu"))
        device = self._spec.device
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        launch = self.runner.dispatch(num_rows, num_rows, True)
        prepared = self.runner.prepare(launch, zeros, zeros, step.to(device).metadata)
        hidden = self.runner.run(prepared).cpu()
        after = copy_of(self.cache, torch.device("cpu"))
        done = dataclasses.replace(step, cache=after)
        shape = (-1, self._spec.num_layers, self._spec.num_heads, self._spec.head_dim)
        for layer in range(self._spec.num_layers):
            result = hidden.view(shape)[:, layer]
            done.assert_right(result, layer, tolerance=self._tolerance)
        written = torch.zeros(self.cache.num_blocks * self._spec.block_size, dtype=torch.bool)
        written[step.metadata.slot_mapping] = True
        written[: self._spec.block_size] = True  # the null block
        kept = ~written
        for old, new in zip(
            (*before.keys, *before.values), (*after.keys, *after.values), strict=True
        ):
            old, new = old.flatten(0, 1)[kept], new.flatten(0, 1)[kept]
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
        size = prepared.launch.size
        return prepared.launch, self.runner._graphs.hidden[:size].cpu().clone()
