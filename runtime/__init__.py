"""Requests, policy and models: the public API of stepgraph.

Names are imported when first used, so that policy modules load without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .config import EngineConfig
    from .engine import Engine
    from .errors import (
        ConfigError,
        DeadlineExceededError,
        EngineDeadError,
        EngineStateError,
        InvalidRequestError,
        LogitsProcessorError,
        ModelLoadError,
        NonFiniteLogitsError,
        QueueFullError,
        StepFailedError,
        StructuredOutputError,
        UnsupportedModelError,
    )
    from .llm import LLM
    from .metrics import EngineMetrics
    from .outputs import CompletionOutput, Logprob, PromptScore, RequestMetrics, RequestOutput
    from .sampling_params import RequestOutputKind, SamplingParams
    from .structured_outputs import StructuredOutputsParams

_MODULES = {
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "DeadlineExceededError": "errors",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineMetrics": "metrics",
    "EngineStateError": "errors",
    "InvalidRequestError": "errors",
    "LLM": "llm",
    "LogitsProcessorError": "errors",
    "Logprob": "outputs",
    "ModelLoadError": "errors",
    "NonFiniteLogitsError": "errors",
    "PromptScore": "outputs",
    "QueueFullError": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StepFailedError": "errors",
    "StructuredOutputError": "errors",
    "StructuredOutputsParams": "structured_outputs",
    "UnsupportedModelError": "errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "DeadlineExceededError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineMetrics",
    "EngineStateError",
    "InvalidRequestError",
    "LogitsProcessorError",
    "Logprob",
    "ModelLoadError",
    "NonFiniteLogitsError",
    "PromptScore",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StepFailedError",
    "StructuredOutputError",
    "StructuredOutputsParams",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
