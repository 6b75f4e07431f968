"""This machine's memory as an engine for W1: a token is one reading of the model's weights.

What it gives is the limit of any engine that reads all weights for each token, from the same kind
of pages, in the same run. Memory that other machines share has fast and slow minutes, so a figure
says little without what the memory gave beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


class MemoryLimit:
    """Serves one sequence at a time, as bench_peers.py asks for W1.

    Args:
        model: directory of a model with tied embeddings; its weights' bytes are what is read.
        options: "threads".
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from attention.huge_pages import empty_in_huge_pages

        num_bytes = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
        memory = empty_in_huge_pages(num_bytes // 64 * 64).numpy()
        memory.fill(1)
        self._parts = np.array_split(memory.view(np.float32), options["threads"])
        self._pool = ThreadPoolExecutor(len(self._parts))
        self._num_left: dict[int, int] = {}

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Queue a request."""
        self._num_left[index] = request["max_tokens"]

    def step(self) -> list[tuple[int, int, bool]]:
        """Read the weights once."""
        largest: Callable[[np.ndarray], Any] = np.ndarray.max
        for _ in self._pool.map(largest, self._parts):
            pass
        for index in self._num_left:
            self._num_left[index] -= 1
        served = [(index, 1, left == 0) for index, left in self._num_left.items()]
        self._num_left = {index: left for index, left in self._num_left.items() if left}
        return served
