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
from .native_call import DTYPES, AttentionTeam, attention_team, check_status, pack_call
from .native_plan import CapturableNativePlan, NativePlan, make_plan
from .paged_kv_cache import PagedKVCache

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor slot_mapping, Tensor block_tables, Tensor work, float scale, int window, str library"
)


class NativeBackend(AttentionBackend):
    """The CPU's backend; see the module's docstring.

    Args:
        spec: what to attend.
        cache_dir: where the built library is kept; None: stepgraph in the user's cache.
        level: the vector instructions to use, a name from usable_levels(); None takes the best.
    """

    name: ClassVar[str] = "native"
    heads_outermost: ClassVar[bool] = True

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
        if spec.dtype not in DTYPES:
            reasons.append(f"dtype {spec.dtype} is none of {', '.join(map(str, DTYPES))}")
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

    def team(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        plan: NativePlan,
        out: torch.Tensor,
    ) -> AttentionTeam:
        """All layers of a step, for a native library whose own threads work on them in turn.

        Each layer finds its queries, keys and values where the one before found them, and writes
        where that one wrote; tensors are as for `run`. `check_status` raises what `run` would.
        """
        return attention_team(
            *(query, key, value, cache.keys, cache.values, plan.slot_mapping, plan.block_tables),
            *(plan.layers, self.spec.scale, self._windows, self.library),
            out=out,
        )


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

    `query`, `key` and `value` may have any strides; the other tensors are as for `pack_call`.
    `library` is the path of the built one to use.
    """
    query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
    words = pack_call(
        *(query, key, value, keys, values, slot_mapping, block_tables, work, scale, window),
        out=out,
    )
    bad = ctypes.c_int64()
    call = (ctypes.c_int64 * len(words))(*words)
    check_status(load_library(library).stepgraph_attend(call, ctypes.byref(bad)), bad, keys)


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
