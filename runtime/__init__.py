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
        LogitsProcessorError,
        ModelLoadError,
        NonFiniteLogitsError,
        UnsupportedModelError,
    )
    from .llm import LLM
    from .outputs import CompletionOutput, Logprob, PromptScore, RequestMetrics, RequestOutput
    from .sampling_params import SamplingParams

_MODULES = {
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "Engine": "engine",
    "EngineConfig": "config",
    "InvalidRequestError": "errors",
    "LLM": "llm",
    "LogitsProcessorError": "errors",
    "Logprob": "outputs",
    "ModelLoadError": "errors",
    "NonFiniteLogitsError": "errors",
    "PromptScore": "outputs",
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
    "LogitsProcessorError",
    "Logprob",
    "ModelLoadError",
    "NonFiniteLogitsError",
    "PromptScore",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
