"""The progress bar of `LLM.generate`."""

from __future__ import annotations

import time

from tqdm import tqdm

from .metrics import EngineCounters


class Progress:
    """Shows finished outputs, prompt tokens/s and output tokens/s; use as a context manager."""

    def __init__(self, num_outputs: int, counters: EngineCounters, *, enabled: bool) -> None:
        self._counters = counters
        self._start = time.monotonic()
        self._num_prompt_tokens = counters.num_prompt_tokens
        self._num_output_tokens = counters.num_output_tokens
        self._bar = tqdm(
            total=num_outputs, unit="output", desc="generate", disable=not enabled, leave=True
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, num_finished: int) -> None:
        """Call once a step."""
        if self._bar.disable:
            return
        seconds = max(time.monotonic() - self._start, 1e-9)
        prompt = self._counters.num_prompt_tokens - self._num_prompt_tokens
        output = self._counters.num_output_tokens - self._num_output_tokens
        self._bar.set_postfix_str(
            f"prompt {prompt / seconds:.0f} tok/s, output {output / seconds:.0f} tok/s",
            refresh=False,
        )
        self._bar.update(num_finished)
