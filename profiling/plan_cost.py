"""Host time of preparing a decode step for FlashInfer, FlashInfer's own planner apart.

    python profiling/plan_cost.py [--seqs 256] [--context 600] [--steps 200]

Three ways of planning: `captured` as for a full graph, with the copies into its static inputs;
`eager`; and `mixed`, where one chunk of a prompt joins the decodes. `pack` builds the flat batch
before either. `planner` is what the package's plan functions take of it. Medians over the steps,
in microseconds; nothing of the device's work is included.

Without a CUDA device, or without the package, wrappers that do nothing stand in for it. On a CPU
the operators that list a step's pages are called on one page: what the calls take is counted, what
they would leave to the device isn't. Launching kernels costs more than calling these does, so the
numbers that matter come from a CUDA device.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from host_cost import BLOCK_SIZE, MAX_MODEL_LEN, Loop

from attention import AttentionMetadata, AttentionSpec, flashinfer_backend, flashinfer_capture
from attention.flashinfer_library import (
    FAST_PLAN_PARAMETERS,
    library_reasons,
    load_flashinfer,
)
from attention.page_plan import expand_pages
from graphs.static_inputs import StaticInputs
from runtime.input_batch import InputBatch, pack
from runtime.staging import StagingBuffer

CHUNK = 512


class Idle:
    """A wrapper that plans nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pin_memory_int_workspace_buffer = self._plan_info = ()

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """As a planner that takes no time."""

    reset_workspace_buffer = plan


def _idle_fast_plan() -> Callable[..., None]:
    """Idle.plan with the signature that the backend looks for."""

    def plan(*args: Any, **kwargs: Any) -> None:
        pass

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in FAST_PLAN_PARAMETERS]
    plan.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return plan


class Planner:
    """The package, or idle wrappers, with a clock on all of its planning."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self.is_real = device.type == "cuda" and not library_reasons()
        names = ("Decode", "Prefill")
        classes = [f"Batch{name}WithPagedKVCacheWrapper" for name in names]
        if self.is_real:
            real = load_flashinfer()
            self.module = SimpleNamespace(**{name: getattr(real, name) for name in classes})
            self.module.__version__ = real.__version__
            self.module.fast_decode_plan = self._timed(real.fast_decode_plan)
        else:
            self.module = SimpleNamespace(**{name: type(name, (Idle,), {}) for name in classes})
            self.module.__version__ = "0.7.4"
            self.module.fast_decode_plan = _idle_fast_plan()
        for name in classes:
            cls = getattr(self.module, name)
            cls.plan = self._timed(cls.plan)

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            function(*args, **kwargs)
            self.seconds += time.perf_counter() - start

        return call


def list_one_page() -> None:
    """Have the backend list one page, whatever the step."""
    table = torch.zeros(1, 1, dtype=torch.int32)
    rank, page = torch.zeros(2, 1, dtype=torch.int32)
    packed = torch.tensor([0, 1, 1, 0], dtype=torch.int32)

    def expand(*args: torch.Tensor) -> None:
        expand_pages(table, packed, rank, page)

    flashinfer_backend.expand_pages = flashinfer_capture.expand_pages = expand


def make_backend(
    planner: Planner, device: torch.device, num_seqs: int
) -> flashinfer_backend.FlashInferBackend:
    """The heads of Llama 3 8B, one window."""
    spec = AttentionSpec(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device=device,
        block_size=BLOCK_SIZE,
        windows=(None,),
        scale=128**-0.5,
        max_num_seqs=num_seqs + 1,
        max_num_tokens=max(8192, num_seqs + CHUNK),
    )
    return type("Timed", (flashinfer_backend.FlashInferBackend,), {"library": planner.module})(spec)


def with_chunk(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same step with a chunk of the last sequence's length and blocks in place of its row."""
    bounds = metadata.cu_seqlens_q_cpu.copy()
    bounds[-1] += CHUNK - 1
    device = metadata.block_tables.device
    return AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(bounds).to(device),
        cu_seqlens_k=metadata.cu_seqlens_k,
        max_seqlen_q=CHUNK,
        max_seqlen_k=metadata.max_seqlen_k,
        slot_mapping=torch.zeros(int(bounds[-1]), dtype=torch.int64, device=device),
        context_lens=metadata.context_lens,
        block_tables=metadata.block_tables,
        num_decodes=metadata.num_decodes - 1,
        block_size=metadata.block_size,
        cu_seqlens_q_cpu=bounds,
        context_lens_cpu=metadata.context_lens_cpu,
        block_tables_cpu=metadata.block_tables_cpu,
    )


def measure(
    work: Callable[[], object], planner: Planner, steps: int, device: torch.device
) -> tuple[float, float]:
    """Median microseconds of a call: outside the planner, and in it."""
    own, planned = [], []
    for _ in range(steps + 10):
        planner.seconds, start = 0.0, time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        own.append(1e6 * (seconds - planner.seconds))
        planned.append(1e6 * planner.seconds)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return statistics.median(own[10:]), statistics.median(planned[10:])


def ways(
    backend: flashinfer_backend.FlashInferBackend, batch: InputBatch, num_seqs: int
) -> dict[str, Callable[[], object]]:
    """Name to what prepares a step in that way."""
    inputs = StaticInputs(
        max_tokens=num_seqs,
        max_seqs=num_seqs,
        max_blocks=MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        device=backend.spec.device,
    )
    captured = backend.capturable_plan(inputs.dummy_decode(num_seqs))
    metadata = batch.metadata
    mixed = with_chunk(metadata)

    def plan_captured() -> None:
        inputs.load(batch.input_ids, batch.positions, metadata.slot_mapping, num_seqs)
        assert captured.refresh(inputs.load_decode(metadata, num_seqs))

    return {
        "captured": plan_captured,
        "eager": lambda: backend.plan(metadata),
        "mixed": lambda: backend.plan(mixed),
    }


def main() -> None:
    """Print a line for each number of sequences and way of planning."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--context", type=int, default=600, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    planner = Planner(device)
    if device.type == "cpu":
        list_one_page()
    version = planner.module.__version__ if planner.is_real else "stand-in"
    print(f"{device}, flashinfer {version}, numpy {np.__version__}, torch {torch.__version__}")
    print("sequences  way          pack    plan   pack + plan   planner   microseconds a step")
    for num_seqs in args.seqs:
        loop = Loop(num_seqs, max(args.context, CHUNK))
        staging = StagingBuffer(device)
        scheduled = loop.step()
        build = functools.partial(pack, loop.table, scheduled, staging)
        packing, _ = measure(build, planner, args.steps, device)
        backend = make_backend(planner, device, num_seqs)
        for way, work in ways(backend, build(), num_seqs).items():
            own, planned = measure(work, planner, args.steps, device)
            numbers = f"{packing:8.1f}{own:8.1f}{packing + own:14.1f}{planned:10.1f}"
            print(f"{num_seqs:9d}  {way:9s}{numbers}")


if __name__ == "__main__":
    main()
