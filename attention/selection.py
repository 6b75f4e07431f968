"""Choosing a backend: by name, or the first one that can run here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from .backend import AttentionBackend
from .flashinfer_options import FlashInferOptions
from .metadata import AttentionSpec

logger = logging.getLogger("stepgraph.attention")


def _load_flashinfer() -> type[AttentionBackend]:
    from .flashinfer_backend import FlashInferBackend

    return FlashInferBackend


def _load_flash_attn() -> type[AttentionBackend]:
    from .flash_attn_backend import FlashAttnBackend

    return FlashAttnBackend


def _load_native() -> type[AttentionBackend]:
    from .native_backend import NativeBackend

    return NativeBackend


def _load_torch() -> type[AttentionBackend]:
    from .torch_backend import TorchBackend

    return TorchBackend


# In the order of preference. A loader imports its backend's module only when it is asked, and
# that module imports its vendor's package only when it is used.
_LOADERS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "flashinfer": _load_flashinfer,
    "flash_attn": _load_flash_attn,
    "native": _load_native,
    "torch": _load_torch,
}
# What is lost when one that was made for a type of device can't run on it.
_LOSSES: dict[str, tuple[str, str]] = {
    "flashinfer": ("cuda", "attention on this GPU may take longer"),
    "native": ("cpu", "attention on this CPU will take several times as long"),
}


def backend_names() -> tuple[str, ...]:
    """Names that select_backend takes besides "auto", the preferred ones first."""
    return tuple(_LOADERS)


def rejected_backends(
    spec: AttentionSpec, *, cache_dir: Path | None = None
) -> dict[str, list[str]]:
    """Map each backend that can't run spec here to all of its reasons."""
    reasons = {
        name: load().unsupported_reasons(spec, cache_dir=cache_dir)
        for name, load in _LOADERS.items()
    }
    return {name: why for name, why in reasons.items() if why}


def block_size_multiple(name: str) -> int:
    """What block sizes must be a multiple of for the backend called name; 1 for "auto".

    Raises ValueError for an unknown name.
    """
    return 1 if name == "auto" else _backend_class(name).block_size_multiple


def preferred_block_size(
    name: str, spec: AttentionSpec, *, cache_dir: Path | None = None
) -> tuple[int, str]:
    """The block size for the backend called name, or for the one that "auto" will take.

    Args:
        name: as for select_backend.
        spec: with the default block size, which is kept unless the backend needs another one.
        cache_dir: as for select_backend.

    Returns:
        The block size, and why it is this one.
    """
    names = list(_LOADERS) if name == "auto" else [name]
    # Once the rest takes the default, which of them can run doesn't matter.
    while any(spec.block_size % block_size_multiple(candidate) for candidate in names):
        candidate = names.pop(0)
        backend = _backend_class(candidate)
        size = max(spec.block_size, backend.block_size_multiple)
        fitting = dataclasses.replace(spec, block_size=size)
        if name == candidate or not backend.unsupported_reasons(fitting, cache_dir=cache_dir):
            why = "the default" if fitting == spec else f"what attention backend {candidate} needs"
            return size, why
    return spec.block_size, "the default"


def select_backend(
    name: str,
    spec: AttentionSpec,
    *,
    cache_dir: Path | None = None,
    flashinfer_options: FlashInferOptions | None = None,
) -> AttentionBackend:
    """Make the backend called name, or with "auto" the preferred one of those that can run.

    Args:
        name: one of backend_names(), or "auto".
        spec: what it has to attend.
        cache_dir: where it may keep what it builds; None: stepgraph in the user's cache.
        flashinfer_options: for "flashinfer" alone.

    Raises ValueError for an unknown name, for a backend that can't run spec here (with its
    reasons; no other one is taken instead), for "auto" when none can, and for options that the
    backend doesn't take.
    """
    if name == "auto":
        name = _preferred_name(spec, cache_dir)
    else:
        reasons = _backend_class(name).unsupported_reasons(spec, cache_dir=cache_dir)
        if reasons:
            raise ValueError(
                f"attention backend {name!r} can't run here: {'; '.join(reasons)}. "
                'Choose another one, or "auto"'
            )
    backend: Any = _backend_class(name)
    if flashinfer_options is None:
        return cast("AttentionBackend", backend(spec, cache_dir=cache_dir))
    if name != "flashinfer":
        raise ValueError(
            f"attention backend {name!r} doesn't take {flashinfer_options}; leave "
            'flashinfer_options out, or choose "flashinfer"'
        )
    return cast("AttentionBackend", backend(spec, cache_dir=cache_dir, options=flashinfer_options))


def _backend_class(name: str) -> type[AttentionBackend]:
    if name not in _LOADERS:
        known = ", ".join(["auto", *_LOADERS])
        raise ValueError(f"unknown attention backend {name!r}; choose one of {known}")
    return _LOADERS[name]()


def _preferred_name(spec: AttentionSpec, cache_dir: Path | None) -> str:
    rejected = rejected_backends(spec, cache_dir=cache_dir)
    passed_over = {name: "; ".join(why) for name, why in rejected.items()}
    usable = [name for name in _LOADERS if name not in rejected]
    if not usable:
        listing = ". ".join(f"{name}: {why}" for name, why in passed_over.items())
        raise ValueError(f"no attention backend can run here. {listing}")
    chosen, *less_preferred = usable
    passed_over |= dict.fromkeys(less_preferred, f"can run, but {chosen} is preferred")
    for name in rejected:
        device_type, loss = _LOSSES.get(name, ("", ""))
        if device_type == spec.device.type:
            logger.warning(
                "attention backend %s can't run here: %s. Using %s: %s",
                *(name, passed_over[name], chosen, loss),
            )
    listing = ", ".join(f"{name} ({why})" for name, why in passed_over.items()) or "none"
    logger.info("attention backend: %s (auto); passed over: %s", chosen, listing)
    return chosen
