"""A graph runner over a backend, ready to be compared with eager code, on a CPU or on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from attention import AttentionBackend, AttentionSpec, rejected_backends, select_backend
from graphs import GraphOptions, GraphPool, GraphRunner, GraphSupport, Launch
from graphs.cuda_graph import CudaGraphPool
from graphs.host_graph import HostGraphPool
from tests.graphs.padded_attention import PaddedBackend
from tests.graphs.traffic import (
    BUDGET,
    MAX_BLOCKS,
    MAX_SEQS,
    Comparison,
    Traffic,
    poisoned_cache,
    tiny_spec,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
DECODE_SIZES = (1, 2, 4, MAX_SEQS)
MIXED_SIZES = (1, 2, 4, 8, 12, BUDGET)
MODES = ("full", "piecewise", "full_and_piecewise")

on_device = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present"),
)


def new_pool(device: torch.device) -> GraphPool:
    return HostGraphPool() if device.type == "cpu" else CudaGraphPool(device)


class Setup:
    """A model captured over a poisoned cache.

    Args:
        model: for eager runs, and for capture unless `model_to_capture` is given.
        mode: the graph mode.
        backend: None: the dense stand-in on the CPU.
        cache: None: blocks of NaN.
        captures: whether to capture everything now, and to insist that it works.
        compared: further arguments of Comparison.
        options: of GraphOptions.
    """

    def __init__(
        self,
        model,
        mode,
        *,
        backend=None,
        cache=None,
        model_to_capture=None,
        captures=True,
        compared=None,
        **options,
    ) -> None:
        self.backend: AttentionBackend = backend or PaddedBackend(tiny_spec(CPU))
        self.cache = cache or poisoned_cache(self.backend.spec)
        defaults = {"decode_sizes": DECODE_SIZES, "mixed_sizes": MIXED_SIZES}
        self.options = GraphOptions(
            mode=mode, **({"max_blocks_per_seq": MAX_BLOCKS} | defaults | options)
        )
        self.pool = new_pool(self.backend.spec.device)
        self.runner = GraphRunner(
            model_to_capture or model,
            self.backend,
            self.cache,
            self.options,
            self.pool,
            graph_support=self.backend if isinstance(self.backend, GraphSupport) else None,
        )
        if captures:
            self.runner.capture()
            assert not self.runner.dropped
        self.comparison = Comparison(
            model, self.backend, self.runner, self.cache, **(compared or {})
        )

    def serve(self, traffic: Traffic) -> list[Launch]:
        """Run all that is queued, each step compared; the launches taken."""
        before = len(self.comparison.steps)
        while (step := traffic.schedule()) is not None:
            traffic.update(step[0], self.comparison.step(*step))
        return [step.launch for step in self.comparison.steps[before:]]


def decode_traffic(num_seqs, *, length=3, max_tokens=6, device=CPU) -> Traffic:
    """num_seqs prompts that then decode together."""
    traffic = Traffic(device)
    for i in range(num_seqs):
        traffic.add([(7 * i + j) % 50 for j in range(length)], max_tokens)
    return traffic


def make_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The dense stand-in of these tests, or a backend that users get."""
    if name == "padded":
        return PaddedBackend(spec)
    if name != "auto" and name in rejected_backends(spec):
        pytest.skip("; ".join(rejected_backends(spec)[name]))
    return select_backend(name, spec)


def kinds_of(launches: Sequence[Launch]) -> set[str]:
    return {launch.mode for launch in launches}
