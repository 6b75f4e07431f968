"""The sampling parameters that a model's own files recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import InvalidRequestError, ModelLoadError
from .sampling_params import SamplingParams

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling_params(path: Path) -> SamplingParams:
    """What generation_config.json in a model's directory says of sampling; ours for the rest.

    As in vLLM: `do_sample` is not looked at, and `max_new_tokens` becomes `max_tokens`. Raises
    ModelLoadError where the file is not a JSON object or a value is out of range.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        found: dict[str, Any] = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"{file} is not a JSON object: {error}") from error
    options = {name: found[name] for name in _NAMES if found.get(name) is not None}
    if found.get("max_new_tokens") is not None:
        options["max_tokens"] = found["max_new_tokens"]
    try:
        return SamplingParams(**options)
    except (TypeError, InvalidRequestError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
