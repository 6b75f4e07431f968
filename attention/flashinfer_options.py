"""Which of FlashInfer's kernels the backend uses. Making the options doesn't import the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PrefillKernel = Literal["fa2", "fa3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferOptions:
    """Choices that want measuring on the machine and model at hand."""

    prefill_kernel: PrefillKernel = "fa2"
    """"fa3" is for long prompts on Hopper: it neither packs the query heads of a key/value head
    into one tile nor splits keys."""
    ragged_prompts: bool = False
    """In steps whose prompts all have nothing cached, read their keys and values from the step's
    own tensors, not from the pages that were just written. Not measured yet."""
    mixed_kernel: bool = False
    """Run steps that hold prompts as one launch of a persistent kernel, an experiment. Its planner
    waits for the device, and models with windows can't use it."""

    def __post_init__(self) -> None:
        if self.prefill_kernel not in get_args(PrefillKernel):
            raise ValueError(
                f"prefill_kernel must be one of {', '.join(get_args(PrefillKernel))}, got "
                f"{self.prefill_kernel!r}"
            )
