"""FlashInfer's wrappers: how they are made, planned and launched.

A wrapper keeps one plan, so there is one per window and kind of launch, each with a schedule of
its own in the shared workspace. What is touched here besides the public interface is the plan
vector (what a captured graph bakes in) and the host memory that the planner writes to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .backend import AttentionPlan
from .flashinfer_library import FlashInferLibrary
from .flashinfer_options import PrefillKernel
from .flashinfer_workspace import FlashInferWorkspace, Staging, decodes_on_tensor_cores
from .metadata import AttentionSpec
from .page_plan import PagePart, PagePlan

LAUNCHES_PER_WINDOW = 2

_LAYOUT = "NHD"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launch:
    """A planned wrapper, and the rows of the step that it attends."""

    wrapper: Any
    rows: slice
    is_ragged: bool = False  # takes the step's own keys and values in place of the cache's

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Attend the rows, into out; query, key, value and out are the whole step's."""
        rows = self.rows
        source = (key[rows], value[rows]) if self.is_ragged else (cache,)
        self.wrapper.run(query[rows], *source, out=out[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedLaunch(Launch):
    """A planned BatchAttention, which wants the cap again at each run."""

    soft_cap: float

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """See Launch.run."""
        rows = self.rows
        self.wrapper.run(query[rows], cache, out=out[rows], logits_soft_cap=self.soft_cap)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferPlan(AttentionPlan):
    """One step's plan: good until the backend plans the next one."""

    slot_mapping: torch.Tensor  # [num_tokens] int64, device
    layers: tuple[tuple[Launch, ...], ...]  # per layer
    idle_rows: tuple[slice, ...]  # padded rows, which no launch writes or which may be NaN
    padding: torch.Tensor | None  # [num_tokens, 1, 1] bool, device; rows of a captured step to zero
    number: int | None  # counts the backend's plans; None: of a captured step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernels:
    """What all wrappers of a backend have in common."""

    spec: AttentionSpec
    library: FlashInferLibrary
    workspace: FlashInferWorkspace
    fast_plan: Callable[..., None] | None  # replans captured decodes; None: plan() does

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Windows of the layers, each once."""
        return tuple(dict.fromkeys(self.spec.windows))

    def new_wrapper(self, name: str, index: int, **options: Any) -> Any:
        """Make a wrapper of the package's class `name`, with the schedule of launch `index`."""
        wrapper = getattr(self.library.module, name)(
            self.workspace.float_buffer, _LAYOUT, **options
        )
        assert hasattr(wrapper, "_pin_memory_int_workspace_buffer"), (
            f"flashinfer's {name} keeps its staging memory elsewhere than this backend expects"
        )
        self.bind(wrapper, index)
        return wrapper

    def bind(self, wrapper: Any, index: int) -> None:
        """Give a wrapper the workspace's buffers, again if they moved."""
        workspace = self.workspace
        wrapper.reset_workspace_buffer(workspace.float_buffer, workspace.schedules[index])

    def plan_options(self, window: int | None) -> dict[str, Any]:
        """Options of plan() that depend on nothing but the layer."""
        spec = self.spec
        return {
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": spec.soft_cap,
            "sm_scale": spec.scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.dtype,
        }

    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, and their size."""
        return self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim

    def plan_decode(
        self,
        wrapper: Any,
        window: int | None,
        part: PagePart,
        indices: torch.Tensor,
        schedule: torch.Tensor,
        fast_plan: Callable[..., None] | None = None,
    ) -> None:
        """Plan a decode wrapper.

        Args:
            wrapper: a BatchDecodeWithPagedKVCacheWrapper.
            window: of its layers.
            part: sequences of one row each.
            indices: [part.num_pages] int32, device.
            schedule: host memory that the planner may write until its copy is done.
            fast_plan: plans without copying what a captured wrapper's buffers hold already.
        """
        wrapper._pin_memory_int_workspace_buffer = schedule
        indptr, last_page_len = _tensor(part.kv_indptr), _tensor(part.last_page_len)
        arguments = (indptr, indices, last_page_len, *self.heads(), self.spec.block_size)
        options = self.plan_options(window)
        if fast_plan is not None:
            fast_plan(wrapper, *arguments, **options, global_override_indptr_cpu=indptr)
            return
        wrapper.plan(
            *arguments, **options, o_data_type=self.spec.dtype, seq_lens=_tensor(part.context_lens)
        )


class WindowLauncher:
    """The wrappers of all layers with the same window, for steps that run eagerly.

    Args:
        kernels: see there.
        window: of the layers.
        first: the first of the LAUNCHES_PER_WINDOW launches that it may plan in a step.
        prefill_kernel: of everything that isn't a decode.
        ragged_prompts: whether prompts with nothing cached skip the pages.
    """

    def __init__(
        self,
        kernels: Kernels,
        window: int | None,
        first: int,
        *,
        prefill_kernel: PrefillKernel = "fa2",
        ragged_prompts: bool = False,
    ) -> None:
        self._kernels, self._window = kernels, window
        self._indices = {"decode": first, "prefill": first + 1, "ragged": first + 1}
        self._wrappers = {
            "decode": kernels.new_wrapper(
                "BatchDecodeWithPagedKVCacheWrapper",
                first,
                use_tensor_cores=decodes_on_tensor_cores(kernels.spec),
                backend="fa2",
            ),
            "prefill": kernels.new_wrapper(
                "BatchPrefillWithPagedKVCacheWrapper", first + 1, backend=prefill_kernel
            ),
        }
        if ragged_prompts:
            self._wrappers["ragged"] = kernels.new_wrapper(
                "BatchPrefillWithRaggedKVCacheWrapper", first + 1, backend=prefill_kernel
            )

    def bind(self) -> None:
        """Take the workspace's buffers again, after they moved."""
        for name, wrapper in self._wrappers.items():
            self._kernels.bind(wrapper, self._indices[name])

    def plan(self, pages: PagePlan, indices: torch.Tensor, staging: Staging) -> tuple[Launch, ...]:
        """Plan a step: none, one or two launches; parts without any context have none.

        Args:
            pages: the step.
            indices: [pages.num_pages] int32, device.
            staging: host memory of the step.
        """
        launches = []
        split = pages.decode.num_pages
        if split:
            launches.append(self._plan_decode(pages.decode, indices[:split], staging))
        if pages.prefill.num_pages:
            first = pages.decode.num_rows
            rows = slice(first, first + pages.prefill.num_rows)
            is_fresh = np.array_equal(np.diff(pages.prefill.qo_indptr), pages.prefill.context_lens)
            if is_fresh and "ragged" in self._wrappers:
                launches.append(self._plan_ragged(pages.prefill, rows, staging))
            else:
                launches.append(self._plan_prefill(pages.prefill, rows, indices[split:], staging))
        return tuple(launches)

    def _plan_decode(self, part: PagePart, indices: torch.Tensor, staging: Staging) -> Launch:
        wrapper = self._wrappers["decode"]
        schedule = staging.schedules[self._indices["decode"]]
        self._kernels.plan_decode(wrapper, self._window, part, indices, schedule)
        return Launch(wrapper=wrapper, rows=slice(0, part.num_seqs))

    def _plan_prefill(
        self, part: PagePart, rows: slice, indices: torch.Tensor, staging: Staging
    ) -> Launch:
        wrapper, kernels = self._wrappers["prefill"], self._kernels
        wrapper._pin_memory_int_workspace_buffer = staging.schedules[self._indices["prefill"]]
        wrapper.plan(
            _tensor(part.qo_indptr),
            _tensor(part.kv_indptr),
            indices,
            _tensor(part.last_page_len),
            *kernels.heads(),
            kernels.spec.block_size,
            causal=True,
            o_data_type=kernels.spec.dtype,
            seq_lens=_tensor(part.context_lens),
            max_token_per_sequence=int(np.diff(part.qo_indptr).max()),
            **kernels.plan_options(self._window),
        )
        return Launch(wrapper=wrapper, rows=rows)

    def _plan_ragged(self, part: PagePart, rows: slice, staging: Staging) -> Launch:
        wrapper, kernels = self._wrappers["ragged"], self._kernels
        wrapper._pin_memory_int_workspace_buffer = staging.schedules[self._indices["ragged"]]
        indptr = _tensor(part.qo_indptr)
        wrapper.plan(
            indptr,
            indptr,
            *kernels.heads(),
            causal=True,
            o_data_type=kernels.spec.dtype,
            **kernels.plan_options(self._window),
        )
        return Launch(wrapper=wrapper, rows=rows, is_ragged=True)


class MixedLauncher:
    """One persistent kernel for decodes and prefills together: an experiment.

    Its planner waits for the device, knows no windows, and takes 384 MiB for itself.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        device = kernels.spec.device
        self._wrapper = kernels.library.module.BatchAttention(_LAYOUT, str(device))

    def plan(
        self, pages: PagePlan, qo_indptr: np.ndarray, indices: torch.Tensor
    ) -> tuple[Launch, ...]:
        """Plan all sequences of a step in one launch.

        Args:
            pages: the step.
            qo_indptr: [num_seqs + 1] int32; the rows of all sequences.
            indices: [pages.num_pages] int32, device.
        """
        kernels, (num_heads, num_kv_heads, head_dim) = self._kernels, self._kernels.heads()
        num_seqs = len(qo_indptr) - 1
        options = kernels.plan_options(None)
        del options["window_left"]
        context_lens = np.concatenate([pages.decode.context_lens, pages.prefill.context_lens])
        self._wrapper.plan(
            _tensor(qo_indptr),
            _tensor(pages.packed[: num_seqs + 1]),
            indices,
            _tensor(context_lens),
            *(num_heads, num_kv_heads, head_dim, head_dim, kernels.spec.block_size),
            causal=True,
            **options,
        )
        cap = kernels.spec.soft_cap or 0.0
        rows = slice(0, int(qo_indptr[-1]))
        return (MixedLaunch(wrapper=self._wrapper, rows=rows, soft_cap=cap),)


def plan_vector(wrapper: Any) -> tuple[int, ...]:
    """What the wrapper's launch is made from, besides the contents of buffers."""
    return tuple(map(int, wrapper._plan_info))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)
