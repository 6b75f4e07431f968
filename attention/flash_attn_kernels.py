"""FlashAttention 2 over pages, from the flash_attn package or from torch: which one, and how.

Both are builds of the same kernels (arXiv:2307.08691) with different signatures. What they share,
read in their sources:

- Lengths and block tables are read on the device; the longest lengths are host numbers that the
  launch is sized by, and what lies beyond them is silently left out.
- Where every sequence has one row, query heads outnumber key/value heads and there is no window,
  the query heads of one key/value head become the rows of one tile, and long contexts are split
  over the GPU (split-KV). The kernel then takes row s for sequence s: no sequence may lack its row.
- Split-KV of anything else combines its parts wrongly: rows of later sequences stay unwritten
  (pytorch/pytorch issue 194167). The package never splits there; torch does unless told not to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

_PACKAGE_VERSION = (2, 8)


class KernelMissingError(RuntimeError):
    """FlashAttention can't be had here; the message says why for each place it could come from."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceGroup:
    """Successive sequences that one call attends."""

    first_row: int  # rows of the flat batch
    last_row: int
    cu_seqlens_q: torch.Tensor  # [n + 1] int32, device, from 0
    cu_seqlens_k: torch.Tensor  # [n + 1] int32, device, from 0
    context_lens: torch.Tensor  # [n] int32, device
    block_tables: torch.Tensor  # [n, max_blocks] int32, device
    max_seqlen_q: int  # 1 only if each sequence has exactly one row
    max_seqlen_k: int  # no context is longer


class PagedAttention(Protocol):
    """One call of the kernel."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: SequenceGroup,
        *,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        """Attend query [rows of the group, num_heads, head_dim]; the result has its shape.

        Args:
            query: last dimension contiguous, as keys and values.
            keys: [num_blocks, block_size, num_kv_heads, head_dim].
            values: like keys.
            group: whose rows these are.
            window: keys that a query sees, itself included; None: all up to its own.
            scale: what scores are multiplied by.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """Where FlashAttention comes from here."""

    name: str
    reason: str
    """Why it comes from there."""
    attend: PagedAttention


def find_kernel() -> Kernel:
    """The flash_attn package's function, else torch's.

    Raises KernelMissingError if neither is there.
    """
    try:
        return _from_package()
    except KernelMissingError as package:
        try:
            return _from_torch(reason=str(package))
        except KernelMissingError as error:
            raise KernelMissingError(f"{package}, and {error}") from None


def _from_package() -> Kernel:
    try:
        import flash_attn
    except ImportError as error:
        raise KernelMissingError(f"the flash_attn package can't be imported ({error})") from error
    # The namespace package of FlashAttention 4 has neither a version nor this function.
    version = str(getattr(flash_attn, "__version__", "unknown"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not _PACKAGE_VERSION <= numbers < (_PACKAGE_VERSION[0] + 1,):
        raise KernelMissingError(f"the flash_attn package has version {version}, not 2.8 or later")
    function: Callable[..., torch.Tensor] = flash_attn.flash_attn_varlen_func

    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: SequenceGroup,
        *,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        return function(
            query,
            keys,
            values,
            cu_seqlens_q=group.cu_seqlens_q,
            cu_seqlens_k=group.cu_seqlens_k,
            max_seqlen_q=group.max_seqlen_q,
            max_seqlen_k=group.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=group.block_tables,
        )

    return Kernel(name=f"flash_attn {version}", reason="the package is installed", attend=attend)


def _from_torch(reason: str) -> Kernel:
    function = _varlen_attn()

    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: SequenceGroup,
        *,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        one_row_each = group.max_seqlen_q == 1
        if window is not None:
            window_size = (window - 1, 0)
        else:
            # Causal or not is the same for one row, but only the latter is packed.
            window_size = (-1, -1) if one_row_each else (-1, 0)
        packed = one_row_each and window is None and query.shape[1] > keys.shape[2]
        return function(
            query,
            keys,
            values,
            cu_seq_q=group.cu_seqlens_q,
            cu_seq_k=group.cu_seqlens_k,
            max_q=group.max_seqlen_q,
            max_k=group.max_seqlen_k,
            scale=scale,
            window_size=window_size,
            enable_gqa=True,
            seqused_k=group.context_lens,
            block_table=group.block_tables,
            num_splits=None if packed else 1,
        )

    return Kernel(name=f"varlen_attn of torch {torch.__version__}", reason=reason, attend=attend)


def _varlen_attn() -> Callable[..., torch.Tensor]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise KernelMissingError(f"torch {torch.__version__} has no varlen_attn") from error
    if not {"block_table", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys():
        raise KernelMissingError(
            f"varlen_attn of torch {torch.__version__} takes no block table, which 2.12 brought"
        )
    if torch.version.cuda is not None and not torch.backends.cuda.is_flash_attention_available():
        raise KernelMissingError(f"torch {torch.__version__} was built without FlashAttention")
    # Its result is a pair only if more is asked for.
    return cast("Callable[..., torch.Tensor]", varlen_attn)
