"""How many KV blocks fit, with the arithmetic written out, and the step that needs most beside."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .errors import ConfigError
from .sampling_params import SamplingParams
from .step import ScheduledBatch

if TYPE_CHECKING:
    from graphs import TrialCapture

    from .resolved_config import ResolvedConfig

GIB = 1 << 30
DEFAULT_CPU_BYTES = 4 * GIB
DEFAULT_CPU_SHARE = 4  # at most a quarter of the memory that is free


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSize:
    """The size of a KV pool and where it comes from."""

    num_blocks: int
    """Blocks, the null block included."""
    arithmetic: str
    """One line for the log."""


def cuda_kv_bytes(
    *, total: int, utilization: float, in_use: int, activation_peak: int, graphs: int
) -> int:
    """Memory left for the KV pool on a GPU.

    Args:
        total: the device's memory, bytes.
        utilization: share of it that the engine may use.
        in_use: bytes that everything takes now, weights and other programs included.
        activation_peak: bytes that the largest possible step takes on top while it runs.
        graphs: bytes that captured graphs will take.
    """
    return int(total * utilization) - in_use - activation_peak - graphs


def estimated_graph_bytes(trials: Iterable[TrialCapture]) -> int:
    """What all graphs will take, judged by trial captures.

    They share one pool and the largest of each kind is captured first, so each further one adds
    about what the second did: the little that it can't place in the first one's memory, and what
    the driver keeps for it. (vLLM's estimate is of the same form.)
    """
    return sum(t.first_bytes + (t.num_graphs - 1) * t.next_bytes for t in trials)


def cpu_kv_bytes(available: int | None = None) -> int:
    """Default memory of the KV pool on a CPU: 4 GiB or a quarter of what is free."""
    if available is None:
        available = available_memory()
    return min(DEFAULT_CPU_BYTES, available // DEFAULT_CPU_SHARE)


def available_memory() -> int:
    """Bytes that a process can still take without swapping, container limits respected."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _lines("/sys/fs/cgroup/memory.max")
    used = _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        available = min(available, int(limit[0]) - int(used[0]))
    return max(available, 0)


def size_kv_pool(
    *,
    num_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    max_blocks_per_seq: int,
    num_blocks: int | None = None,
) -> KVPoolSize:
    """Blocks of a pool of `num_bytes`, or `num_blocks` usable ones if that is given.

    Raises:
        ConfigError: not even one usable block fits.
    """
    useful = max_num_seqs * max_blocks_per_seq
    if num_blocks is not None:
        usable, source = num_blocks, "num_kv_blocks"
    else:
        fitting = num_bytes // bytes_per_block - 1
        usable = min(fitting, useful)
        source = f"{num_bytes / GIB:.2f} GiB at {bytes_per_block / 1024:.1f} KiB a block"
        if fitting > useful:
            source += f", cut to what {max_num_seqs} sequences can use"
    if usable < 1:
        raise ConfigError(
            f"{num_bytes} bytes hold no KV block besides the null block ({bytes_per_block} bytes "
            f"each); raise kv_cache_bytes or gpu_memory_utilization, lower "
            f"max_num_batched_tokens, or capture fewer graphs"
        )
    size = (usable + 1) * bytes_per_block / GIB
    return KVPoolSize(
        num_blocks=usable + 1,
        arithmetic=(
            f"KV pool: {usable} blocks of {block_size} tokens + the null block = {size:.2f} GiB "
            f"({source}); room for {usable * block_size} tokens, "
            f"{usable / max_blocks_per_seq:.1f} sequences of full length"
        ),
    )


def give_back_free_memory(device: torch.device) -> None:
    """Return to the system, or the driver, what was freed on `device` and is kept for reuse."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_host_memory()


def trim_host_memory() -> None:
    """Return to the system what was freed in the process's heap and is kept for reuse."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc has it
        trim(0)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().splitlines()
    except OSError:
        return []  # not this system's way of telling


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
