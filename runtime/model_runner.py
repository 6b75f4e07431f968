"""Everything of a step that happens on the device. Holds no policy."""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from attention import PagedKVCache, select_backend
from graphs import (
    CaptureLadders,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphSupport,
    StepStatistics,
)

from .input_batch import InputBatch, pack, pack_logits
from .kv_memory import (
    cpu_kv_bytes,
    cuda_kv_bytes,
    estimated_graph_bytes,
    give_back_free_memory,
    largest_step,
    size_kv_pool,
)
from .loaded_model import LoadedModel
from .models import DecoderConfig
from .pending_step import DrawnStep, ForwardOutput, InlineQueue, PendingStep, StepTimer, StepWorker
from .ranges import Ranges
from .resolved_config import ResolvedConfig
from .row_table import RowTable
from .staging import StagingRing
from .step import LateIdsBatch, ScheduledBatch, StepOutput
from .steps_in_flight import MAX_IN_FLIGHT
from .token_sampler import OutputCopy, TokenSampler

logger = logging.getLogger("stepgraph.runtime")


class ModelRunner:
    """Owns the weights, the KV pool and the row table, and executes scheduled batches.

    Args:
        config: the resolved options.
        decoder_config: the model's shape.
        ranges: opens the NVTX ranges pack, plan, forward and sample.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        decoder_config: DecoderConfig,
        ranges: Ranges,
    ) -> None:
        self._config = config
        self._ranges = ranges
        self._loaded = LoadedModel(config, decoder_config)
        self._model = self._loaded.decoder
        self._spec = config.attention_spec(decoder_config)
        self._backend = select_backend(
            config.attention_backend,
            self._spec,
            cache_dir=config.cache_dir,
            flashinfer_options=config.flashinfer_options,
        )
        depth = MAX_IN_FLIGHT if config.overlap_scheduling else 1
        self._staging = StagingRing(config.device, depth)
        self._late_staging = StagingRing(config.device, depth)
        self._rows = self._new_row_table()
        self._sampler = TokenSampler(
            config.max_num_seqs,
            decoder_config.vocab_size,
            config.device,
            cache_dir=config.cache_dir,
        )
        self.estimated_graph_bytes: int | None = None
        """What was kept free of KV blocks for the graphs; None: the pool's size was given."""
        cache = self._allocate_kv_pool()
        self.num_kv_blocks = cache.num_blocks
        """Blocks of the KV pool, the null block included."""
        self.graph_bytes = 0
        """What the graphs that were captured at the start took."""
        self._graphs = self._capture_graphs(cache)
        needs_worker = config.overlap_scheduling and config.device.type == "cpu"
        self._tasks = StepWorker() if needs_worker else InlineQueue()

    @property
    def statistics(self) -> StepStatistics:
        """How steps were launched, per graph mode and bucket."""
        return self._graphs.statistics

    @property
    def ladders(self) -> CaptureLadders:
        """Sizes that have a graph now, or get one when first used; steps are launched at these."""
        return self._graphs.ladders

    @property
    def dropped_graphs(self) -> dict[str, str]:
        """Sizes that were to be captured and have no graph, each with the reason."""
        return {f"{mode} {size}": why for (mode, size), why in self._graphs.dropped.items()}

    @property
    def compilation(self) -> dict[str, Any]:
        """Whether layers are compiled, why not, and what compiling each region took."""
        return self._loaded.compilation

    @property
    def has_weights(self) -> bool:
        """False while weights are given back, or were read in part only: no step may run."""
        return self._loaded.weights.is_whole

    def execute(self, scheduled: ScheduledBatch) -> StepOutput:
        """Run one step that has at least one token, with no other in flight."""
        batch = self._pack(scheduled)
        self._sampler.admit(scheduled)
        return self._run(batch, scheduled, self._graphs)

    def launch(self, scheduled: ScheduledBatch) -> PendingStep:
        """Queue a step behind the one in flight, for whose ids it may have placeholders.

        What goes wrong is raised by the result. The draw of a step that waits for ids is left to
        `draw`.
        """
        pending = PendingStep(scheduled, self._tasks)
        try:
            batch = self._pack(scheduled)
        except Exception as error:  # noqa: BLE001 - raised once the step before is in
            pending.fail(error)
            return pending
        pending.start(lambda: self._start(batch, scheduled))
        if not scheduled.draw_waits:
            pending.draw(self._finish)
        return pending

    def draw(self, pending: PendingStep, late: LateIdsBatch) -> None:
        """Queue the draw of a launched step that waited for `late`."""
        try:
            self._rows.take_late_ids(pending.scheduled, late)
            logits = pack_logits(self._rows, pending.scheduled, self._late_staging.next())
        except Exception as error:  # noqa: BLE001 - raised by the result, as all else
            pending.fail(error)
            return

        def finish(forward: ForwardOutput) -> DrawnStep:
            batch = dataclasses.replace(forward.batch, logits=logits)
            return self._finish(dataclasses.replace(forward, batch=batch))

        pending.draw(finish)

    def note_seconds(self, drawn: DrawnStep) -> float:
        """Add the time of a launched step that has ended to the statistics, and return it."""
        seconds = drawn.timer.seconds()
        self._graphs.statistics.add_seconds(drawn.launch, seconds)
        return seconds

    # -- sleeping -------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Give back the KV pool and the graphs, from level 2 on the weights too.

        Only with no step in flight. Buffers of steps, sampling and attention are kept.
        """
        if self._config.device.type == "cuda":
            torch.cuda.synchronize(self._config.device)  # sync: once; nothing reads it any more
        # A runner of eager steps on null blocks stands in, so that statistics can be asked for.
        self._graphs = self._new_graph_runner(
            self._backend.allocate_cache(2),
            self._no_graphs(),
            self._new_graph_pool(),
            self._graphs.statistics,
        )
        if level >= 2:
            self._loaded.weights.release()
        give_back_free_memory(self._config.device)

    def wake_up(self, level: int) -> None:
        """Take back what `sleep` gave back, and capture graphs again.

        What fails is raised, and all is asleep as before.
        """
        try:
            if level >= 2:
                self._loaded.weights.reload()
            self._graphs = self._capture_graphs(
                self._backend.allocate_cache(self.num_kv_blocks), self._graphs.statistics
            )
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            self.sleep(level)
            raise

    def reload_weights(self, path: Path | None) -> None:
        """Read other weights in place; see DecoderWeights.reload."""
        self._loaded.weights.reload(path)

    # -- a step ---------------------------------------------------------------------------------

    def _pack(self, scheduled: ScheduledBatch) -> InputBatch:
        with self._ranges("pack", scheduled.num_tokens):
            self._rows.apply(scheduled)
            return pack(self._rows, scheduled, self._staging.next())

    def _start(self, batch: InputBatch, scheduled: ScheduledBatch) -> ForwardOutput:
        self._sampler.admit(scheduled)
        self._sampler.fill_placeholders(batch)
        return self._run_forward(batch, scheduled, self._graphs)

    @torch.inference_mode()
    def _run_forward(
        self, batch: InputBatch, scheduled: ScheduledBatch, graphs: GraphRunner
    ) -> ForwardOutput:
        num_tokens = scheduled.num_tokens
        launch = graphs.dispatch(num_tokens, scheduled.num_seqs, scheduled.is_uniform_decode)
        timer = StepTimer(self._config.device)  # a capture at first use isn't the step's own time
        with self._ranges("plan", num_tokens, scheduled.bucket):
            step = graphs.prepare(launch, batch.input_ids, batch.positions, batch.metadata)
        if batch.block_copies is not None:
            graphs.cache.copy_blocks(*batch.block_copies)
        with self._ranges("forward", num_tokens, 0 if step.launch.mode == "eager" else launch.size):
            hidden = graphs.run(step, batch.logits_indices)
        return ForwardOutput(hidden=hidden, batch=batch, launch=step.launch, timer=timer)

    @torch.inference_mode()
    def _finish(self, forward: ForwardOutput) -> DrawnStep:
        with self._ranges("sample", len(forward.hidden)):
            drawn = self._sampler.draw(self._model.compute_logits, forward.hidden, forward.batch)
            forward.timer.stop()  # before the copy, which is what is waited for
            copy = OutputCopy(drawn, forward.batch)
        return DrawnStep(copy=copy, launch=forward.launch, timer=forward.timer)

    def _run(self, batch: InputBatch, scheduled: ScheduledBatch, graphs: GraphRunner) -> StepOutput:
        forward = self._run_forward(batch, scheduled, graphs)
        if len(forward.hidden) == 0:
            return StepOutput(token_ids=np.empty(0, np.int64), is_valid=np.empty(0, bool))
        drawn = self._finish(forward)
        output = drawn.copy.wait()
        graphs.statistics.add_seconds(drawn.launch, drawn.timer.seconds())
        return output

    # -- graphs -----------------------------------------------------------------------------

    def _graph_options(self) -> GraphOptions:
        config, ladders = self._config, self._config.ladders
        if ladders is None:
            return self._no_graphs()
        if self._graph_support() is None:
            ladders = ladders.without_full_graphs()
        return GraphOptions(
            mode=config.graph_mode,
            decode_sizes=() if ladders.decode is None else ladders.decode.sizes,
            mixed_sizes=() if ladders.mixed is None else ladders.mixed.sizes,
            max_blocks_per_seq=config.max_blocks_per_seq,
            lazy=config.lazy_capture,
        )

    def _no_graphs(self) -> GraphOptions:
        return GraphOptions(
            mode="none",
            decode_sizes=(),
            mixed_sizes=(),
            max_blocks_per_seq=self._config.max_blocks_per_seq,
        )

    def _graph_support(self) -> GraphSupport | None:
        return self._backend if isinstance(self._backend, GraphSupport) else None

    def _new_graph_runner(
        self,
        cache: PagedKVCache,
        options: GraphOptions,
        pool: GraphPool,
        statistics: StepStatistics | None = None,
    ) -> GraphRunner:
        return GraphRunner(
            self._loaded.forward,
            self._backend,
            cache,
            options,
            pool,
            graph_support=self._graph_support(),
            statistics=statistics,
        )

    def _capture_graphs(
        self, cache: PagedKVCache, statistics: StepStatistics | None = None
    ) -> GraphRunner:
        """The runner of all steps, with what is captured before the first of them."""
        options, pool = self._graph_options(), self._new_graph_pool()
        before = pool.num_bytes() if options.mode != "none" else 0
        graphs = self._new_graph_runner(cache, options, pool, statistics)
        if options.mode == "none":
            return graphs
        show = sys.stderr.isatty()
        graphs.capture(lambda sizes: tqdm(sizes, desc="capture graphs", disable=not show))
        self.graph_bytes = pool.num_bytes() - before
        estimate = self.estimated_graph_bytes
        logger.info(
            "graph memory: %.1f MiB for %d graphs%s",
            *(self.graph_bytes / 2**20, len(graphs.statistics.captures)),
            "" if estimate is None else f", {estimate / 2**20:.1f} MiB were estimated for all",
        )
        return graphs

    def _estimate_graph_bytes(self) -> int:
        """What the graphs will take, by trial captures against the smallest KV pool."""
        if self._config.graph_mode == "none":
            return 0
        cache, pool = self._backend.allocate_cache(2), self._new_graph_pool()
        before = pool.num_bytes()
        runner = self._new_graph_runner(cache, self._graph_options(), pool)
        num_bytes = max(0, pool.num_bytes() - before)  # the static inputs
        num_bytes += estimated_graph_bytes(runner.measure())
        del runner, pool
        gc.collect()  # the trial's memory is free before the KV pool is sized
        return num_bytes

    def _new_graph_pool(self) -> GraphPool:
        if self._config.device.type == "cuda":
            from graphs.cuda_graph import CudaGraphPool

            return CudaGraphPool(self._config.device)
        from graphs.host_graph import HostGraphPool

        return HostGraphPool()

    # -- memory -----------------------------------------------------------------------------

    def _new_row_table(self) -> RowTable:
        config = self._config
        return RowTable(
            config.max_num_seqs,
            config.max_blocks_per_seq,
            config.block_size,
            keeps_drawn=config.overlap_scheduling,
        )

    def _allocate_kv_pool(self) -> PagedKVCache:
        config = self._config
        num_bytes = 0
        if config.num_kv_blocks is None:
            num_bytes = config.kv_cache_bytes or self._default_kv_bytes()
        size = size_kv_pool(
            num_bytes=num_bytes,
            bytes_per_block=PagedKVCache.bytes_per_block(self._spec),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
            num_blocks=config.num_kv_blocks,
        )
        logger.info("%s", size.arithmetic)
        return self._backend.allocate_cache(size.num_blocks)

    def _default_kv_bytes(self) -> int:
        device = self._config.device
        if device.type == "cpu":
            self.estimated_graph_bytes = graphs = self._estimate_graph_bytes()
            return cpu_kv_bytes() - graphs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._run_largest_step()
        torch.cuda.synchronize(device)  # sync: once, while starting
        peak = torch.cuda.max_memory_allocated(device) - before
        self.estimated_graph_bytes = graphs = self._estimate_graph_bytes()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        num_bytes = cuda_kv_bytes(
            total=total,
            utilization=self._config.gpu_memory_utilization,
            in_use=total - free,
            activation_peak=peak,
            graphs=graphs,
        )
        logger.info(
            "KV memory: %.2f GiB * %.2f - %.2f GiB in use - %.2f GiB activations - %.2f GiB graphs "
            "= %.2f GiB",
            *(total / 2**30, self._config.gpu_memory_utilization, (total - free) / 2**30),
            *(peak / 2**30, graphs / 2**30, num_bytes / 2**30),
        )
        return num_bytes

    def _run_largest_step(self) -> None:
        """Execute the largest step that the limits allow, sampler included, on null blocks."""
        scheduled = largest_step(self._config)
        rows = self._new_row_table()
        rows.apply(scheduled)
        batch = pack(rows, scheduled, self._staging.next())
        cache = self._backend.allocate_cache(2)
        graphs = self._new_graph_runner(cache, self._no_graphs(), self._new_graph_pool())
        self._run(batch, scheduled, graphs)
