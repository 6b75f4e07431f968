"""Everything of a step that happens on the device. Holds no policy."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time

import numpy as np
import torch
from tqdm import tqdm

from attention import PagedKVCache, select_backend
from graphs import GraphOptions, GraphPool, GraphRunner, GraphSupport, StepStatistics

from .input_batch import InputBatch, pack
from .kv_memory import cpu_kv_bytes, cuda_kv_bytes, size_kv_pool
from .models import DecoderConfig, load_decoder, prepack_refusal
from .ranges import Ranges
from .resolved_config import ResolvedConfig
from .row_table import RowTable
from .sampler import sample
from .sampling_params import SamplingParams
from .staging import StagingBuffer
from .step import ScheduledBatch, StepOutput

logger = logging.getLogger("stepgraph.runtime")


class ModelRunner:
    """Owns the weights, the KV pool and the row table, and executes scheduled batches.

    Args:
        config: the resolved options.
        decoder_config: the model's shape.
        end_token_ids: ids that may not be drawn before a sequence's min_tokens.
        ranges: opens the NVTX ranges pack, plan, forward and sample.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        decoder_config: DecoderConfig,
        end_token_ids: tuple[int, ...],
        ranges: Ranges,
    ) -> None:
        self._config = config
        self._end_token_ids = end_token_ids
        self._ranges = ranges
        self._model = load_decoder(
            # No position past max_model_len occurs, so the rotary table need not hold one.
            dataclasses.replace(decoder_config, max_position_embeddings=config.max_model_len),
            config.model_path,
            dtype=config.dtype,
            device=config.device,
            load_format=config.load_format,
            seed=config.seed,
        )
        self._prepack_weights()
        self._spec = config.attention_spec(decoder_config)
        self._backend = select_backend(
            config.attention_backend, self._spec, cache_dir=config.cache_dir
        )
        self._staging = StagingBuffer(config.device)
        self._rows = self._new_row_table()
        cache = self._allocate_kv_pool()
        self.num_kv_blocks = cache.num_blocks
        """Blocks of the KV pool, the null block included."""
        self._graphs = self._new_graph_runner(cache, self._graph_options())
        show = config.graph_mode != "none" and sys.stderr.isatty()
        self._graphs.capture(lambda sizes: tqdm(sizes, desc="capture graphs", disable=not show))

    @property
    def statistics(self) -> StepStatistics:
        """How steps were launched, per graph mode and bucket."""
        return self._graphs.statistics

    @property
    def dropped_graphs(self) -> dict[str, str]:
        """Sizes that were to be captured and have no graph, each with the reason."""
        return {f"{mode} {size}": why for (mode, size), why in self._graphs.dropped.items()}

    def execute(self, scheduled: ScheduledBatch) -> StepOutput:
        """Run one step that has at least one token."""
        with self._ranges("pack", scheduled.num_tokens):
            self._rows.apply(scheduled)
            batch = pack(self._rows, scheduled, self._staging, self._end_token_ids)
        return self._run(batch, scheduled, self._graphs)

    @torch.inference_mode()
    def _run(self, batch: InputBatch, scheduled: ScheduledBatch, graphs: GraphRunner) -> StepOutput:
        start = time.perf_counter()
        num_tokens, num_sampled = scheduled.num_tokens, len(scheduled.sampled)
        with self._ranges("plan", num_tokens, scheduled.bucket):
            uniform = scheduled.is_uniform_decode
            launch = graphs.dispatch(num_tokens, scheduled.num_seqs, uniform)
            step = graphs.prepare(launch, batch.input_ids, batch.positions, batch.metadata)
        with self._ranges("forward", num_tokens, 0 if step.launch.mode == "eager" else launch.size):
            hidden = graphs.run(step, batch.logits_indices)
        if num_sampled == 0:
            return StepOutput(token_ids=np.empty(0, np.int64), is_valid=np.empty(0, bool))
        with self._ranges("sample", num_sampled):
            sampled = sample(self._model.compute_logits(hidden), batch.sampling)
            token_ids = torch.where(sampled.is_valid, sampled.token_ids, -1)
            ids = token_ids.cpu().numpy()  # sync: the scheduler needs the ids to go on
        graphs.statistics.add_seconds(step.launch, time.perf_counter() - start)
        return StepOutput(token_ids=ids, is_valid=ids >= 0)

    def _prepack_weights(self) -> None:
        config = self._config
        refusal = prepack_refusal(config.dtype, config.device)
        if refusal is None and config.graph_mode != "none":
            refusal = "prepacked weights have no address that a captured graph could hold"
        if refusal is None:
            self._model.prepack()
        logger.info("weights prepacked: %s", "yes" if refusal is None else f"no, {refusal}")

    # -- graphs -----------------------------------------------------------------------------

    def _graph_options(self) -> GraphOptions:
        config, ladders = self._config, self._config.ladders
        if ladders is None or config.graph_mode == "none":
            return self._no_graphs()
        decode, mixed = ladders.decode.sizes, ladders.mixed.sizes
        return GraphOptions(
            mode=config.graph_mode,
            decode_sizes=decode,
            # Without full graphs decode steps are piecewise too, and want their own sizes there.
            mixed_sizes=mixed if self._has_full_graphs() else (*decode, *mixed),
            max_blocks_per_seq=config.max_blocks_per_seq,
        )

    def _no_graphs(self) -> GraphOptions:
        return GraphOptions(
            mode="none",
            decode_sizes=(),
            mixed_sizes=(),
            max_blocks_per_seq=self._config.max_blocks_per_seq,
        )

    def _has_full_graphs(self) -> bool:
        """Whether decode steps can run as one graph: only with a backend that supports it."""
        return self._config.graph_mode != "piecewise" and self._graph_support() is not None

    def _graph_support(self) -> GraphSupport | None:
        return self._backend if isinstance(self._backend, GraphSupport) else None

    def _new_graph_runner(self, cache: PagedKVCache, options: GraphOptions) -> GraphRunner:
        return GraphRunner(
            self._model,
            self._backend,
            cache,
            options,
            self._new_graph_pool(),
            graph_support=self._graph_support(),
        )

    def _new_graph_pool(self) -> GraphPool:
        if self._config.device.type == "cuda":
            from graphs.cuda_graph import CudaGraphPool

            return CudaGraphPool(self._config.device)
        from graphs.host_graph import HostGraphPool

        return HostGraphPool()

    # -- memory -----------------------------------------------------------------------------

    def _new_row_table(self) -> RowTable:
        config = self._config
        return RowTable(config.max_num_seqs, config.max_blocks_per_seq, config.block_size)

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
        return PagedKVCache.allocate(self._spec, size.num_blocks)

    def _default_kv_bytes(self) -> int:
        device = self._config.device
        if device.type == "cpu":
            return cpu_kv_bytes()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._run_largest_step()
        torch.cuda.synchronize(device)  # sync: once, while starting
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        num_bytes = cuda_kv_bytes(
            total=total,
            utilization=self._config.gpu_memory_utilization,
            in_use=total - free,
            activation_peak=peak,
        )
        logger.info(
            "KV memory: %.2f GiB * %.2f - %.2f GiB in use - %.2f GiB activations = %.2f GiB",
            *(total / 2**30, self._config.gpu_memory_utilization, (total - free) / 2**30),
            *(peak / 2**30, num_bytes / 2**30),
        )
        return num_bytes

    def _run_largest_step(self) -> None:
        """Execute the largest step that the limits allow, sampler included, on null blocks."""
        scheduled = largest_step(self._config)
        rows = self._new_row_table()
        rows.apply(scheduled)
        batch = pack(rows, scheduled, self._staging, self._end_token_ids)
        cache = PagedKVCache.allocate(self._spec, 2)
        self._run(batch, scheduled, self._new_graph_runner(cache, self._no_graphs()))


def largest_step(config: ResolvedConfig) -> ScheduledBatch:
    """A batch of max_num_seqs fresh prompts that fill the token budget, each one sampled.

    Its size follows from the budget, not from max_model_len: no larger step ever runs.
    """
    num_seqs = config.max_num_seqs
    new = np.full(num_seqs, config.max_num_batched_tokens // num_seqs, dtype=np.int64)
    new[: config.max_num_batched_tokens % num_seqs] += 1
    new = np.minimum(new, config.max_model_len)
    rows = np.arange(num_seqs)
    nothing = np.empty(0, dtype=np.int64)
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)
    return ScheduledBatch(
        step=0,
        rows=rows,
        num_computed_tokens=np.zeros(num_seqs, dtype=np.int64),
        num_new_tokens=new,
        num_decodes=0,
        token_ids=np.zeros(int(new.sum()), dtype=np.int32),
        sampled=rows,
        released_rows=nothing,
        admitted_rows=rows,
        admitted_params=(params,) * num_seqs,
        admitted_seeds=np.zeros(num_seqs, dtype=np.uint64),
        admitted_num_prompt_tokens=new,
        new_block_rows=nothing,
        new_block_indices=nothing,
        new_block_ids=nothing,
    )
