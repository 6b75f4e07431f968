"""Choosing a backend: by name, or the first one that can run here."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .backend import AttentionBackend
from .metadata import AttentionSpec

logger = logging.getLogger("stepgraph.attention")


def _load_flashinfer() -> type[AttentionBackend]:
    from .flashinfer_backend import FlashInferBackend

    return FlashInferBackend


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
    "native": _load_native,
    "torch": _load_torch,
}
# What is lost when one that was made for a type of device can't run on it.
_LOSSES: dict[str, tuple[str, str]] = {
    "flashinfer": ("cuda", "attention takes longer, and decode steps may have no full graphs"),
    "native": ("cpu", "attention on this CPU will take several times as long"),
}


def backend_names() -> tuple[str, ...]:
    """Names that select_backend takes besides "auto", the preferred ones first."""
    return tuple(_LOADERS)


def rejected_backends(spec: AttentionSpec) -> dict[str, list[str]]:
    """Map each backend that can't run spec here to all of its reasons."""
    reasons = {name: load().unsupported_reasons(spec) for name, load in _LOADERS.items()}
    return {name: why for name, why in reasons.items() if why}


def select_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Make the backend called name, or with "auto" the preferred one of those that can run.

    Raises ValueError for an unknown name, for a backend that can't run spec here (with its
    reasons; no other one is taken instead), and for "auto" when none can.
    """
    if name == "auto":
        return _select_preferred(spec)
    if name not in _LOADERS:
        known = ", ".join(["auto", *_LOADERS])
        raise ValueError(f"unknown attention backend {name!r}; choose one of {known}")
    backend = _LOADERS[name]()
    reasons = backend.unsupported_reasons(spec)
    if reasons:
        raise ValueError(
            f"attention backend {name!r} can't run here: {'; '.join(reasons)}. "
            'Choose another one, or "auto"'
        )
    return backend(spec)


def _select_preferred(spec: AttentionSpec) -> AttentionBackend:
    rejected = rejected_backends(spec)
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
    return _LOADERS[chosen]()(spec)
