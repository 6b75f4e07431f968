"""The flashinfer package: which versions are supported, what differs between them, and loading.

This file and flashinfer_launch.py are the places to read again when a new version comes out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Version: TypeAlias = tuple[int, ...]

OLDEST: Version = (0, 6, 18)
"""The first version supported."""
TOO_NEW: Version = (0, 8)
"""The first version not looked at yet."""

_OLDEST, _TOO_NEW = (".".join(map(str, version)) for version in (OLDEST, TOO_NEW))
_REMEDY = f"pip install 'flashinfer-python>={_OLDEST},<{_TOO_NEW}'"
FAST_PLAN_PARAMETERS = (
    *("self", "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim"),
    *("page_size", "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type"),
    *("kv_data_type", "data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking"),
    *("fixed_split_size", "disable_split_kv", "q_len_per_req", "global_override_indptr_cpu"),
)
"""Of fast_decode_plan, which reaches into the wrapper, so it is trusted only as it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferLibrary:
    """An installed flashinfer package, or what stands in for it, and what its version means."""

    module: Any
    """The package."""
    version: Version
    """Its version's numbers, without any suffix."""

    @classmethod
    def of(cls, module: Any) -> FlashInferLibrary:
        """Read the version of a package."""
        return cls(module=module, version=parse_version(module.__version__))

    @property
    def empty_rows_are_zero(self) -> bool:
        """Whether a row without any key gives zeros; NaN before 0.7.0, from merging empty parts."""
        return self.version >= (0, 7, 0)

    @property
    def partial_rows_by_group(self) -> bool:
        """Whether partial results are counted in rows; before 0.7.1, in rows times GQA ratio."""
        return self.version >= (0, 7, 1)

    @property
    def full_decodes_stay_whole(self) -> bool:
        """Whether captured decodes that fill the device don't reserve room for split ones."""
        return self.version >= (0, 7, 4)

    def fast_decode_plan(self) -> Callable[..., None] | None:
        """The package's replanning without copies, or None if its signature isn't the known one."""
        plan = getattr(self.module, "fast_decode_plan", None)
        if plan is None or tuple(inspect.signature(plan).parameters) != FAST_PLAN_PARAMETERS:
            return None
        return plan  # type: ignore[no-any-return]


def parse_version(text: str) -> Version:
    """The numbers that a version begins with: (0, 6, 18) for "0.6.18.post1"."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def load_flashinfer() -> Any:
    """Import the package, which takes seconds and makes a cache folder in the user's home.

    Raises ImportError with a remedy if it is missing, and lets whatever else breaks it through.
    """
    if importlib.util.find_spec("flashinfer") is None:
        raise ImportError(f"flashinfer is not installed; {_REMEDY}")
    return importlib.import_module("flashinfer")


@functools.cache
def library_reasons() -> list[str]:
    """Why the package can't be used here, whatever the model; imports it if it is there."""
    try:
        library = FlashInferLibrary.of(load_flashinfer())
    except (ImportError, OSError, RuntimeError) as error:
        return [str(error) or repr(error)]
    return version_reasons(library) + _build_reasons()


def version_reasons(library: FlashInferLibrary) -> list[str]:
    """Why a version is refused, if it is."""
    if OLDEST <= library.version < TOO_NEW:
        return []
    return [
        f"flashinfer {library.module.__version__} is not from {_OLDEST} up to, but not including, "
        f"{_TOO_NEW}; {_REMEDY}"
    ]


def _build_reasons() -> list[str]:
    """Kernels are compiled at first use, unless the package of compiled ones is installed."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    reasons = []
    if shutil.which("nvcc") is None and not (Path(home) / "bin" / "nvcc").exists():
        reasons.append(
            f"its kernels can't be compiled: nvcc is neither on PATH nor in {home}/bin; install "
            "the CUDA toolkit or flashinfer-jit-cache"
        )
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        reasons.append("its kernels can't be compiled: ninja is missing; pip install ninja")
    return reasons
