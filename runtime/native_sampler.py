"""Drawing tokens on a CPU by a native library, csrc/native_sampler.cpp.

Torch's operators would read each row of logits a dozen times; the library does so twice, and keeps
the row in the cache in between.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from attention.native_build import NativeSource, load_library, usable_levels, usable_library

SAMPLER_SOURCE = NativeSource(
    name="sampler", file=Path(__file__).parent / "csrc" / "native_sampler.cpp"
)
# Logits below which waking a thread costs more than it saves.
_MIN_LOGITS = 1 << 16
_DrawCall = ctypes.c_int64 * 9


def sampler_library(*, level: str | None = None, cache_dir: Path | None = None) -> str:
    """Path of the library, built if need be.

    Args:
        level: the vector instructions to use, a name from usable_levels(); None takes the best.
        cache_dir: where it is kept; None: stepgraph in the user's cache.

    Raises:
        NativeBuildError: it can't be built here.
    """
    return usable_library(SAMPLER_SOURCE, level or usable_levels()[0], cache_dir)


def draw_native(
    library: str, logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's next token, by the definition that `runtime.sampler` gives, without filters.

    Args:
        library: as `sampler_library` gives it.
        logits: [n, vocab] float32 on the CPU.
        temperature: [n] float32; 0 takes the first of the likeliest tokens.
        uniforms: [n] float32 in [0, 1).

    Returns:
        [n] int64 tokens, and [n] float32 largest logits, NaN where one is.
    """
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    assert temperature.is_contiguous() and uniforms.is_contiguous()
    num_rows, vocab = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    best_logits = torch.empty(num_rows, dtype=torch.float32)
    num_threads = torch.get_num_threads() if num_rows * vocab >= 2 * _MIN_LOGITS else 1
    call = _DrawCall(
        *(num_threads, num_rows, vocab, logits.stride(0)),
        *(t.data_ptr() for t in (logits, temperature, uniforms, token_ids, best_logits)),
    )
    load_library(library).stepgraph_draw(call)
    return token_ids, best_logits
