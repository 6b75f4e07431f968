"""Requests, policy and models: the public API of stepgraph.

Names are imported when first used, so that policy modules load without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import Engine
    from .errors import (
        ConfigError,
        InvalidRequestError,
        ModelLoadError,
        NonFiniteLogitsError,
        UnsupportedModelError,
    )
    from .llm import LLM
    from .outputs import CompletionOutput, RequestMetrics, RequestOutput
    from .sampling_params import SamplingParams

_MODULES = {
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "Engine": "engine",
    "EngineConfig": "config",
    "InvalidRequestError": "errors",
    "LLM": "llm",
    "ModelLoadError": "errors",
    "NonFiniteLogitsError": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "UnsupportedModelError": "errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "InvalidRequestError",
    "ModelLoadError",
    "NonFiniteLogitsError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
