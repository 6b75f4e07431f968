"""A stand-in for the flashinfer package, with real numbers, on any device and in any dtype.

It has the public classes that the backend uses, with their signatures, and behaves as they do
where a caller could go wrong:

- plan() works on the host: it writes a schedule to the staging memory and copies it to the int
  workspace. run() follows the schedule that it finds there, and reads pages and lengths from the
  wrapper's buffers, so whatever wasn't planned or refreshed gives stale results.
- Planning reserves workspace as the package's planner does, and fails where that one fails.
- Under a HostGraph, run() is one leaf over the tensors that were bound when it was captured.
- Wrong dtypes, lengths, numbers of rows, and changes that a graph can't follow are refused, also
  some that the package would take for granted.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attention.flashinfer_backend import FlashInferBackend
from tests.attention.flashinfer_schedule import Shape, attend_pages, make_schedule


def make_double(version: str = "0.7.4", *, fast_plan: bool = True) -> ModuleType:
    """A module that looks like the package of a version."""
    numbers = tuple(map(int, version.split(".")[:3]))
    module = ModuleType("flashinfer")
    module.__version__ = version
    for base in (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
        BatchAttention,
    ):
        setattr(module, base.__name__, type(base.__name__, (base,), {"version": numbers}))
    if fast_plan:
        module.fast_decode_plan = fast_decode_plan
    return module


def make_backend_class(library: Any = None) -> type[FlashInferBackend]:
    """The backend on a stand-in, which knows more dtypes and head sizes than the kernels."""
    values = {
        "library": library or make_double(),
        "dtypes": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        "head_dims": tuple(range(1, 257)),
    }
    return type("FlashInferOnDouble", (FlashInferBackend,), values)


class _Wrapper:
    """What the three wrappers share: workspaces, buffers, checks, and the schedule."""

    version: tuple[int, ...] = (0, 7, 4)

    def _set_up(self, float_workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        _refuse(kv_layout != "NHD", f"the backend plans for NHD, got {kv_layout}")
        _refuse(backend not in ("fa2", "fa3"), f"backend must be explicit, got {backend!r}")
        self.device = float_workspace.device
        self._backend = backend
        self._float_workspace_buffer = float_workspace
        self._int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        self._use_cuda_graph = False
        self._fixed: dict[str, int] = {}

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            _refuse(buffer.data_ptr() % 16 != 0, "workspaces must be aligned to 16 bytes")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer, device="cpu")

    def _check_addresses(self) -> None:
        for name, address in self._fixed.items():
            _refuse(getattr(self, name).data_ptr() != address, f"{name} moved under graph mode")

    def _check_indptr(self, name: str, indptr: torch.Tensor) -> None:
        _check_ints(name, indptr)
        _refuse(indptr.device.type != "cpu", f"{name} would be copied back from the device")
        _refuse(int(indptr[0]) != 0, f"{name} must begin with 0")
        _refuse(bool((indptr.diff() < 0).any()), f"{name} decreases: {indptr.tolist()}")

    def _check_pages(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, page_size: int
    ) -> None:
        self._check_indptr("paged_kv_indptr", indptr)
        _check_ints("paged_kv_indices", indices)
        _check_ints("paged_kv_last_page_len", last)
        _refuse(indices.device != self.device, "page indices must be on the device")
        _refuse(len(indices) != int(indptr[-1]), "page indices and indptr disagree")
        _refuse(len(last) != len(indptr) - 1, "last_page_len has another batch size")
        has_pages = indptr.diff() > 0
        wrong = (last < has_pages) | (last > has_pages * page_size)
        _refuse(bool(wrong.any()), f"last_page_len out of range: {last.tolist()}")

    def _plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        kwargs: dict[str, Any],
    ) -> None:
        q_dtype = kwargs["q_data_type"]
        kv_dtype, o_dtype = kwargs["kv_data_type"] or q_dtype, kwargs["o_data_type"] or q_dtype
        self._dtypes = (q_dtype, kv_dtype, o_dtype)
        self._options = (
            kwargs.get("causal", False),
            kwargs["window_left"],
            kwargs["logits_soft_cap"] or 0.0,
            heads[2] ** -0.5 if kwargs["sm_scale"] is None else kwargs["sm_scale"],
            0.0 if self.version >= (0, 7, 0) else math.nan,
        )
        shape = Shape(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            page_size=page_size,
            window_left=kwargs["window_left"],
            is_graph=self._use_cuda_graph,
            version=self.version,
        )
        schedule = make_schedule(shape, qo_indptr.diff().tolist(), kv_indptr.diff().tolist())
        for kind, needed in (("float", schedule.float_bytes), ("int", schedule.int_bytes)):
            buffer = getattr(self, f"_{kind}_workspace_buffer")
            if needed > buffer.numel() * buffer.element_size():
                raise RuntimeError(f"Buffer overflow when allocating {needed} bytes ({kind})")
        num_bytes = 4 * len(schedule.words)
        staged = self._pin_memory_int_workspace_buffer[:num_bytes]
        staged.view(torch.int32).copy_(torch.tensor(schedule.words, dtype=torch.int32))
        self._int_workspace_buffer[:num_bytes].copy_(staged)
        self._plan_info = schedule.vector

    def _launch(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        num_rows: int,
        kv_pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        _refuse(out is None, "out must be passed, or each run clears a new one")
        _refuse(len(q) != num_rows, f"q has {len(q)} rows, {num_rows} were planned")
        for name, tensor, dtype in zip("qko", (q, cache[0], out), self._dtypes, strict=True):
            _refuse(tensor.dtype != dtype, f"{name} is {tensor.dtype}, planned was {dtype}")
            _refuse(tensor.device != self.device, f"{name} isn't on the workspace's device")
        _refuse(out.shape != q.shape, f"out is {tuple(out.shape)}, q is {tuple(q.shape)}")
        _refuse(not out.is_contiguous() or q.stride(-1) != 1, "out or a head isn't contiguous")
        self._check_addresses()
        attend_pages(
            q, cache, out, self._qo_indptr_buf, kv_pages, self._int_workspace_buffer, self._options
        )
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._set_up(float_workspace_buffer, kv_layout, backend)
        self._use_cuda_graph, self.use_tensor_cores = use_cuda_graph, use_tensor_cores
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        if not use_cuda_graph:
            return
        _refuse(not use_tensor_cores, "no room for padding without tensor cores")
        self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
        size = len(paged_kv_indptr_buffer)
        _refuse(size != self._fixed_batch_size + 1, f"paged_kv_indptr_buffer has {size} entries")
        self._qo_indptr_buf = torch.arange(size, dtype=torch.int32, device=self.device)
        self._fixed = {
            "_paged_kv_indptr_buf": paged_kv_indptr_buffer.data_ptr(),
            "_paged_kv_indices_buf": paged_kv_indices_buffer.data_ptr(),
            "_paged_kv_last_page_len_buf": paged_kv_last_page_len_buffer.data_ptr(),
        }

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        sm_scale: float | None = None,
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        kwargs = dict(locals())
        self._check_pages(indptr, indices, last_page_len, page_size)
        _check_lengths(seq_lens, indptr, last_page_len, page_size)
        if self._use_cuda_graph:
            self._check_graph(indices, last_page_len)
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf = indptr.clone()
            self._paged_kv_last_page_len_buf = last_page_len.clone()
            self._paged_kv_indices_buf = indices
            self._qo_indptr_buf = torch.arange(len(indptr), dtype=torch.int32)
        self._cached_module = SimpleNamespace(plan=self._plan)
        heads = (num_qo_heads, num_kv_heads, head_dim)
        one_row_each = torch.arange(len(indptr), dtype=torch.int32)
        self._cached_module.plan(one_row_each, indptr, heads, page_size, kwargs)

    def _check_graph(self, indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
        size, fixed = len(last_page_len), self._fixed_batch_size
        _refuse(size != fixed, f"the batch size is fixed at {fixed} in graph mode, got {size}")
        _refuse(len(indices) > len(self._paged_kv_indices_buf), "the page buffer is too small")
        self._check_addresses()

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pages = (
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
        )
        return self._launch(q, paged_kv_cache, out, len(pages[2]), pages)


def fast_decode_plan(
    self: Any,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plans only: the buffers of graph mode are the caller's to fill."""
    kwargs = dict(locals()) | {"o_data_type": self._dtypes[2]}
    assert self._use_cuda_graph, "without graph mode it would read lengths back from the device"
    _refuse(disable_split_kv, "stale schedules were read before 0.7.1")
    self._check_graph(indices, last_page_len)
    self._check_pages(indptr, indices, last_page_len, page_size)
    host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    heads = (num_qo_heads, num_kv_heads, head_dim)
    one_row_each = torch.arange(len(indptr), dtype=torch.int32)
    self._cached_module.plan(one_row_each, host, heads, page_size, kwargs)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        self._set_up(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        seq_lens: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        kwargs = dict(locals())
        self._check_indptr("qo_indptr", qo_indptr)
        self._check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        _check_lengths(seq_lens, paged_kv_indptr, paged_kv_last_page_len, page_size)
        _refuse(len(qo_indptr) != len(paged_kv_indptr), "the indptrs have different batch sizes")
        longest = int(qo_indptr.diff().max())
        _refuse(max_token_per_sequence not in (None, longest), "max_token_per_sequence is wrong")
        self._qo_indptr_buf = qo_indptr.clone()
        self._paged_kv_indptr_buf = paged_kv_indptr.clone()
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len.clone()
        self._paged_kv_indices_buf = paged_kv_indices
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._plan(qo_indptr, paged_kv_indptr, heads, page_size, kwargs)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pages = (
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
        )
        return self._launch(q, paged_kv_cache, out, int(self._qo_indptr_buf[-1]), pages)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        self._set_up(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
    ) -> None:
        kwargs = dict(locals())
        self._check_indptr("qo_indptr", qo_indptr)
        self._check_indptr("kv_indptr", kv_indptr)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr.clone(), kv_indptr.clone()
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._plan(qo_indptr, kv_indptr, heads, 1, kwargs)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_keys = int(self._kv_indptr_buf[-1])
        _refuse(len(k) != num_keys, f"k has {len(k)} rows, {num_keys} were planned")
        ones = torch.ones(len(self._kv_indptr_buf) - 1, dtype=torch.int32)
        pages = (self._kv_indptr_buf, torch.arange(num_keys), ones)
        cache = (k[:, None], v[:, None])
        return self._launch(q, cache, out, int(self._qo_indptr_buf[-1]), pages)


class BatchAttention:
    version: tuple[int, ...] = (0, 7, 4)

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        # The package takes 384 MiB; how it divides them is of no interest here.
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout, backend="fa2")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
    ) -> None:
        _refuse(head_dim_qk != head_dim_vo, "head sizes differ")
        self._soft_cap = logits_soft_cap or 0.0
        self._wrapper.plan(
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr - (kv_indptr.diff() - 1).clamp(min=0) * page_size,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(
        self,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        logits_soft_cap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _refuse(logits_soft_cap != self._soft_cap, "the cap isn't the planned one")
        return self._wrapper.run(q, kv_cache, out=out), lse


def _check_ints(name: str, tensor: torch.Tensor) -> None:
    _refuse(tensor.dtype != torch.int32, f"{name} is {tensor.dtype}, not int32")
    _refuse(tensor.dim() != 1 or not tensor.is_contiguous(), f"{name} isn't a contiguous list")


def _check_lengths(
    seq_lens: torch.Tensor | None, indptr: torch.Tensor, last: torch.Tensor, page_size: int
) -> None:
    lengths = (indptr.diff() - 1).clamp(min=0) * page_size + last
    wrong = seq_lens is not None and not torch.equal(seq_lens, lengths)
    _refuse(wrong, "seq_lens disagree with the pages")


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ValueError(message)
