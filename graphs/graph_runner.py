"""Runs each step under the captured graph that fits it, and eagerly where none does."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from attention import AttentionBackend, AttentionMetadata, AttentionPlan, PagedKVCache

from .capture_sizes import CaptureLadders, CaptureSizes, Launch
from .captured_graphs import (
    CAPTURE_ERRORS,
    Bucket,
    CapturedGraphs,
    GraphKind,
    TrialCapture,
)
from .decode_graph import GraphSupport
from .forward_model import ForwardModel
from .graph import GraphPool
from .static_inputs import StaticInputs
from .step_statistics import CaptureStatistics, StepStatistics

logger = logging.getLogger("stepgraph.graphs")

GraphMode = Literal["none", "full", "piecewise", "full_and_piecewise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """What is captured. Raises ValueError for an unknown mode and for impossible sizes."""

    mode: GraphMode
    """full: uniform decode only; piecewise: every step; full_and_piecewise: uniform decode in
    full graphs, all else (and decode that no full graph fits) piecewise; none: nothing."""
    decode_sizes: tuple[int, ...]
    """Numbers of sequences, for full graphs."""
    mixed_sizes: tuple[int, ...]
    """Numbers of tokens, for piecewise graphs."""
    max_blocks_per_seq: int
    """Columns of the widest block table that can occur."""
    lazy: bool = False
    """Capture at first use; only the largest size of each kind, whose memory the others run in,
    before the first step."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(GraphMode):
            raise ValueError(
                f"graph mode must be one of {', '.join(get_args(GraphMode))}, got {self.mode!r}"
            )
        for name in ("decode_sizes", "mixed_sizes"):
            sizes = getattr(self, name)
            if any(size < 1 for size in sizes):
                raise ValueError(f"{name} must be at least 1, got {sizes}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedStep:
    """One step, copied in and planned: valid until the next one is prepared."""

    launch: Launch
    number: int
    """Counts the steps prepared, so that a stale one is noticed."""
    num_tokens: int
    """Real tokens."""
    is_uniform_decode: bool
    """Whether every query length is one."""
    input_ids: torch.Tensor
    """[launch.size] padded; a slice of the static buffer if a graph runs."""
    positions: torch.Tensor
    """[launch.size], likewise."""
    plan: AttentionPlan
    """Of the padded step."""


class GraphRunner:
    """Captures a model's forward at some sizes, and launches steps at the nearest one.

    How a model runner uses it, once the KV pool is allocated (its addresses are captured)::

        runner = GraphRunner(model, backend, cache, options, pool, graph_support=...)
        runner.capture(progress=tqdm)                   # before the first step
        ...
        launch = runner.dispatch(num_tokens, num_seqs, is_uniform_decode)
        step = runner.prepare(launch, batch.input_ids, batch.positions, batch.metadata)
        hidden = runner.run(step, batch.logits_indices)  # [num_sampled, hidden_size]
        ... compute_logits(hidden), sample, copy the ids to the host ...
        runner.statistics.add_seconds(step.launch, elapsed)

    `prepare` is the host's work (the range "plan"), `run` the device's (the range "forward").
    They alternate: a prepared step is run before the next is prepared. On CUDA both only queue
    work on the current stream, which orders them after earlier steps. `run` returns memory of
    its own, which no later step overwrites.

    To estimate graph memory, `measure` a runner with a cache of two blocks, and drop it with its
    pool.

    Args:
        model: the forward, compiled or not; captured as it is.
        backend: computes attention; plans anew for each step.
        cache: the KV pool.
        options: the mode and the sizes.
        pool: memory that all graphs share, and which kind of graph they are.
        graph_support: the backend's offer for full graphs; None: it has none, so full graphs
            are left out, and said so.
        statistics: to go on with those of a runner that this one replaces.
    """

    def __init__(
        self,
        model: ForwardModel,
        backend: AttentionBackend,
        cache: PagedKVCache,
        options: GraphOptions,
        pool: GraphPool,
        *,
        graph_support: GraphSupport | None = None,
        statistics: StepStatistics | None = None,
    ) -> None:
        self.cache = cache
        """The KV pool that its steps read and write."""
        self._model = model
        self._backend = backend
        self._pool = pool
        self._options = options
        self._has_full_graphs = graph_support is not None
        self._buckets = _wanted_buckets(options, has_full_graphs=self._has_full_graphs)
        sizes = [size for _, size in self._buckets]
        seqs = [size for kind, size in self._buckets if kind == "full"]
        self._inputs = StaticInputs(
            max_tokens=max(sizes, default=0),
            max_seqs=max(seqs, default=0),
            max_blocks=options.max_blocks_per_seq,
            block_size=backend.spec.block_size,
            device=backend.spec.device,
        )
        self._graphs = CapturedGraphs(model, backend, cache, self._inputs, pool, graph_support)
        self._num_prepared = 0
        self.ladders = CaptureLadders(decode=None, mixed=None)
        """The sizes that `dispatch` chooses from: those with a graph, or with one to come."""
        self.dropped: dict[Bucket, str] = {}
        """Sizes that have no graph though they were wanted, and why."""
        self.statistics = statistics or StepStatistics()
        """Of all steps run so far."""

    def captured_sizes(self, kind: GraphKind) -> tuple[int, ...]:
        """Sizes that have a graph by now, ascending."""
        return tuple(sorted(self._graphs.full if kind == "full" else self._graphs.piecewise))

    def capture(self, progress: Callable[[Sequence[Bucket]], Iterable[Bucket]] = iter) -> None:
        """Capture the sizes, the largest first, so that the smaller ones reuse its memory.

        A size that can't be captured is left out with a warning.

        Args:
            progress: wraps the list of what is captured now, as tqdm does.
        """
        if self._options.mode in ("full", "full_and_piecewise") and not self._has_full_graphs:
            logger.warning(
                "the attention backend can't be part of a full graph: graph mode %s goes "
                "without full graphs",
                self._options.mode,
            )
        largest: dict[GraphKind, Bucket] = {}
        for bucket in self._buckets:
            largest.setdefault(bucket[0], bucket)
        for bucket in progress(list(largest.values()) if self._options.lazy else self._buckets):
            self._capture(bucket, at_first_use=False)
        self._update_ladders()

    def measure(self) -> list[TrialCapture]:
        """What the graphs of each kind take, from trial captures; this runner is of no use then."""
        return self._graphs.measure(self._buckets)

    def dispatch(self, num_tokens: int, num_seqs: int, uniform: bool) -> Launch:
        """Choose how to run a step, and capture what it takes if that is left to the first use.

        Args:
            num_tokens: real tokens.
            num_seqs: sequences.
            uniform: whether every query length is one.
        """
        assert not uniform or num_tokens == num_seqs, "a uniform step has one token per sequence"
        launch = self.ladders.choose(num_tokens, is_uniform_decode=uniform)
        fall = launch.fall
        if launch.mode != "eager":
            bucket = (launch.mode, launch.size)
            if bucket in self._graphs or self._capture_late(bucket):
                return launch
            fall = "capture failed"
        elif not fall and any(kind == "piecewise" or uniform for kind, _ in self._buckets):
            fall = "no graph captured"
        return Launch(mode="eager", size=num_tokens, fall=fall)

    @torch.inference_mode()
    def prepare(
        self,
        launch: Launch,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> PreparedStep:
        """Copy a step into the static inputs, padded to launch.size, and plan its attention.

        Args:
            launch: what `dispatch` chose.
            input_ids: [num_tokens] int32 or int64, device.
            positions: [num_tokens] int64, device.
            metadata: of the unpadded step.

        Returns:
            The step to run. Its launch is eager if the full graph turned out not to fit.
        """
        self._num_prepared += 1
        inputs, size, num_tokens = self._inputs, launch.size, input_ids.shape[0]
        plan = None
        if launch.mode != "eager":
            inputs.load(input_ids, positions, metadata.slot_mapping, size)
        if launch.mode == "full":
            plan = self._graphs.full[size].refresh(inputs.load_decode(metadata, size))
            if plan is None:
                launch = self._retire(launch, num_tokens)
        elif launch.mode == "piecewise":
            slots = inputs.slot_mapping[:size]
            plan = self._backend.plan(dataclasses.replace(metadata, slot_mapping=slots))
        if launch.mode == "eager":
            plan = self._backend.plan(metadata)
        else:
            input_ids, positions = inputs.input_ids[:size], inputs.positions[:size]
        assert plan is not None
        return PreparedStep(
            launch=launch,
            number=self._num_prepared,
            num_tokens=num_tokens,
            is_uniform_decode=metadata.max_seqlen_q == 1,
            input_ids=input_ids,
            positions=positions,
            plan=plan,
        )

    @torch.inference_mode()
    def run(self, step: PreparedStep, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run a prepared step, once.

        Args:
            step: the last one prepared.
            rows: [n] int64, device; which rows to return. None: all real ones.

        Returns:
            [n, hidden_size], never the graph's own memory.
        """
        assert step.number == self._num_prepared, "another step was prepared since"
        self.statistics.count(
            step.launch, step.num_tokens, is_uniform_decode=step.is_uniform_decode
        )
        attend = self._graphs.bind(step.plan)
        if step.launch.mode == "eager":
            return self._model(step.input_ids, step.positions, attend, rows=rows)
        if step.launch.mode == "full":
            self._graphs.full[step.launch.size].replay()
        else:
            self._graphs.piecewise[step.launch.size].replay(attend)
        hidden = self._graphs.hidden[: step.num_tokens]
        return hidden.clone() if rows is None else hidden.index_select(0, rows)

    def _capture(self, bucket: Bucket, *, at_first_use: bool) -> None:
        """Capture one graph; if that fails, its size is dropped with a warning."""
        kind, size = bucket
        start = time.perf_counter()
        try:
            self._graphs.capture(bucket)
        except CAPTURE_ERRORS as error:
            self.dropped[bucket] = str(error)
            logger.warning(
                "no %s graph for size %d, its steps use the next larger one or run eagerly: %s",
                *(kind, size, error),
            )
            return
        self.statistics.captures.append(
            CaptureStatistics(
                mode=kind,
                size=size,
                seconds=time.perf_counter() - start,
                at_first_use=at_first_use,
            )
        )

    def _capture_late(self, bucket: Bucket) -> bool:
        """Capture between two steps, with nothing in flight; False if it failed."""
        self._pool.wait_idle()
        self._capture(bucket, at_first_use=True)
        self._update_ladders()
        return bucket in self._graphs

    def _retire(self, launch: Launch, num_tokens: int) -> Launch:
        """Give up a full graph whose plan has changed; its step runs eagerly."""
        del self._graphs.full[launch.size]
        reason = "changed plan"
        self.dropped["full", launch.size] = reason
        self._update_ladders()
        logger.warning(
            "attention planned a launch that differs from the captured one: the full graph for "
            "size %d is given up",
            launch.size,
        )
        return Launch(mode="eager", size=num_tokens, fall=reason)

    def _update_ladders(self) -> None:
        def ladder(wanted: GraphKind) -> CaptureSizes | None:
            left = [b for b in self._buckets if b[0] == wanted and b not in self.dropped]
            return CaptureSizes(tuple(size for _, size in left)) if left else None

        self.ladders = CaptureLadders(decode=ladder("full"), mixed=ladder("piecewise"))


def _wanted_buckets(options: GraphOptions, *, has_full_graphs: bool) -> list[Bucket]:
    """Everything to be captured, in order: the largest size first."""
    buckets: list[Bucket] = []
    if options.mode in ("full", "full_and_piecewise") and has_full_graphs:
        buckets += [("full", size) for size in set(options.decode_sizes)]
    if options.mode in ("piecewise", "full_and_piecewise"):
        buckets += [("piecewise", size) for size in set(options.mixed_sizes)]
    return sorted(buckets, key=lambda bucket: bucket[1], reverse=True)
