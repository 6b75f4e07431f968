"""Attention on the CPU with a compiled kernel that reads pages in place.

The kernel is one registered operator, stepgraph::native_attention, so that it can live in
compiled layers and graphs; its overload `out` writes into memory that is given. It reads nothing
but its arguments, so a captured call sees what the buffers hold by then. Sources are in csrc/.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import torch

from .backend import AttentionBackend, AttentionPlan
from .metadata import AttentionMetadata, AttentionSpec
from .native_build import (
    ATTENTION_SOURCE,
    NativeBuildError,
    load_library,
    usable_levels,
    usable_library,
)
from .native_plan import CapturableNativePlan, NativePlan, make_plan
from .paged_kv_cache import PagedKVCache

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor slot_mapping, Tensor block_tables, Tensor work, float scale, int window, str library"
)
_NUM_CALL_WORDS = 25
_PackedCall = ctypes.c_int64 * _NUM_CALL_WORDS


class NativeBackend(AttentionBackend):
    """The CPU's backend; see the module's docstring.

    Args:
        spec: what to attend.
        cache_dir: where the built library is kept; None: stepgraph in the user's cache.
        level: the vector instructions to use, a name from usable_levels(); None takes the best.
    """

    name: ClassVar[str] = "native"

    def __init__(
        self, spec: AttentionSpec, *, cache_dir: Path | None = None, level: str | None = None
    ) -> None:
        super().__init__(spec, cache_dir=cache_dir)
        self.library = usable_library(ATTENTION_SOURCE, level or usable_levels()[0], cache_dir)
        self._windows = [0 if window is None else window for window in spec.windows]

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, *, cache_dir: Path | None = None
    ) -> list[str]:
        """Other devices and dtypes are refused, and machines where the kernel can't be built.

        Builds it, so the first call may take some seconds.
        """
        reasons = []
        if spec.device.type != "cpu":
            reasons.append(f"device {spec.device} is not a CPU")
        if spec.dtype not in _DTYPES:
            reasons.append(f"dtype {spec.dtype} is none of {', '.join(map(str, _DTYPES))}")
        if not spec.scale > 0:
            reasons.append(f"scale {spec.scale} is not positive")
        if spec.soft_cap is not None:
            reasons.append("scores can't be capped")
        if not reasons:
            try:
                usable_library(ATTENTION_SOURCE, usable_levels()[0], cache_dir)
            except NativeBuildError as error:
                reasons.append(str(error))
        return reasons

    def plan(self, metadata: AttentionMetadata) -> NativePlan:
        """Make the lists of work for as many threads as torch uses now."""
        assert metadata.block_size == self.spec.block_size, (
            f"metadata is for blocks of {metadata.block_size}, the backend for "
            f"{self.spec.block_size}"
        )
        return make_plan(self.spec, metadata, torch.get_num_threads())

    def capturable_plan(self, metadata: AttentionMetadata) -> CapturableNativePlan:
        """A plan of decode steps that a full graph can hold; metadata is the first one's.

        It keeps metadata's tensors, which hold each step's slots and block tables, and has work
        lists of its own that each step overwrites.
        """
        return CapturableNativePlan(self.spec, metadata, torch.get_num_threads())

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        plan: AttentionPlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write, then attend; padded rows give zeros. See AttentionBackend.run.

        Raises IndexError for a slot or a block outside the cache.
        """
        assert isinstance(plan, NativePlan), "the plan is another backend's"
        args = (
            *(query, key, value, cache.keys[layer], cache.values[layer]),
            *(plan.slot_mapping, plan.block_tables, plan.layers[layer]),
            *(self.spec.scale, self._windows[layer], self.library),
        )
        if out is None:
            result: torch.Tensor = _operator(*args)
            return result
        _out_operator(*args, out=out)
        return out


def _native_attention(query: torch.Tensor, *args: Any) -> torch.Tensor:
    """As `_native_attention_out`, into new memory."""
    out = torch.empty(query.shape, dtype=query.dtype)
    _native_attention_out(query, *args, out=out)
    return out


def _native_attention_out(  # noqa: PLR0913 - an operator's arguments are flat
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    work: torch.Tensor,
    scale: float,
    window: int,
    library: str,
    *,
    out: torch.Tensor,
) -> None:
    """Write key and value into one layer's pages, then attend; the operator's kernel.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim].
        value: like key.
        keys: [num_blocks, block_size, num_kv_heads, head_dim], contiguous; changed in place.
        values: like keys.
        slot_mapping: [num_tokens] int64, contiguous.
        block_tables: [num_seqs, max_blocks] int32, rows contiguous.
        work: [n, WORK_COLUMNS] int32, contiguous; see NativePlan.
        scale: what scores are multiplied by.
        window: keys that a query sees, itself included; 0 for all.
        library: path of the built library to use.
        out: [num_tokens, num_heads, head_dim], contiguous, of query's dtype.
    """
    query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, _ = keys.shape
    assert keys.is_contiguous() and values.is_contiguous() and work.is_contiguous()
    assert key.dtype == value.dtype == keys.dtype == values.dtype == query.dtype
    assert out.is_contiguous() and (out.shape, out.dtype) == (query.shape, query.dtype)
    # In the order of Call in csrc/call.h.
    packed = _PackedCall(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        slot_mapping.data_ptr(),
        block_tables.data_ptr(),
        work.data_ptr(),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        num_tokens,
        num_blocks * block_size,
        block_size.bit_length() - 1,
        num_heads,
        num_kv_heads,
        head_dim,
        block_tables.stride(0),
        window,
        _DTYPES[query.dtype],
        ctypes.c_int64.from_buffer(ctypes.c_double(scale)).value,
    )
    bad = ctypes.c_int64()
    status = load_library(library).stepgraph_attend(packed, ctypes.byref(bad))
    if status:
        what = ("slot", "block")[status - 1]
        raise IndexError(f"{what} {bad.value} is outside the cache of {num_blocks} blocks")


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _native_attention_fake(query: torch.Tensor, *args: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


def _native_attention_out_fake(*args: Any, out: torch.Tensor) -> None:
    pass


_library = torch.library.Library("stepgraph", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"native_attention({_ARGUMENTS}) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("native_attention", _native_attention, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("stepgraph::native_attention", _native_attention_fake, lib=_library)
# It returns nothing: a result that is an argument too could not be functionalized.
_OUT_SCHEMA = f"native_attention.out({_ARGUMENTS}, *, Tensor(c!) out) -> ()"
_library.define(_OUT_SCHEMA)  # type: ignore[no-untyped-call]
_library.impl("native_attention.out", _native_attention_out, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "stepgraph::native_attention.out", _native_attention_out_fake, lib=_library
)
_operator = torch.ops.stepgraph.native_attention.default
_out_operator = torch.ops.stepgraph.native_attention.out
