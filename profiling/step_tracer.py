"""Records a window of engine steps: for nsys, with torch.profiler, or as a trace of its own.

A window opens before step `start_step` and closes `num_steps` later. Its kinds:

- cuda: cudaProfilerStart and cudaProfilerStop, which nsys waits for (see nsys.md).
- torch: torch.profiler on host and device; the engine's stages appear as ranges.
- steps: the engine's stages and counters alone. Both last ones are JSON that Perfetto
  (ui.perfetto.dev) and chrome://tracing open.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from runtime.engine import Engine
from runtime.step import ScheduledBatch

Kind = Literal["cuda", "torch", "steps"]
_LABEL = re.compile(r"(\w+) tokens=(\d+) bucket=(\d+)")


def label(name: str, num_tokens: int, bucket: int) -> str:
    """The name of a range in a torch.profiler trace, where ranges have nothing but a name."""
    return f"{name} tokens={num_tokens} bucket={bucket}"


def parse_label(text: str) -> tuple[str, int, int] | None:
    """What `label` was given; None for other names."""
    match = _LABEL.fullmatch(text)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


class StepTracer:
    """Opens and closes the window as steps go by.

    Args:
        engine: whose steps are recorded; its ranges are used for it.
        kind: what is recorded.
        start_step: the first recorded step, counted from the tracer's making.
        num_steps: how many.
        path: of the JSON file, written when the window closes; None for "cuda".
    """

    def __init__(
        self,
        engine: Engine,
        kind: Kind,
        *,
        start_step: int,
        num_steps: int,
        path: Path | None,
    ) -> None:
        if start_step < 0 or num_steps < 1:
            raise ValueError(f"{start_step=} must not be below 0, and {num_steps=} not below 1")
        if kind != "cuda" and path is None:
            raise ValueError(f"a trace of kind {kind!r} needs a path")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("a trace of kind 'cuda' needs a CUDA device; use 'torch' or 'steps'")
        self._engine = engine
        self._kind = kind
        self._start_step, self._stop_step = start_step, start_step + num_steps
        self._path = path
        self._step = 0
        self._is_open = False
        self._profiler: Any = None
        self._events: list[dict[str, Any]] = []
        self._open_if_due()

    def note_step(self, batch: ScheduledBatch) -> None:
        """A step has ended."""
        if self._is_open and self._kind == "steps":
            self._add_counters(batch)
        self._step += 1
        if self._is_open and self._step == self._stop_step:
            self.close()
        self._open_if_due()

    def close(self) -> None:
        """Close the window if it is open, and write what was recorded."""
        if not self._is_open:
            return
        self._is_open = False
        self._engine.ranges.opener = None
        if self._kind == "cuda":
            torch.cuda.synchronize()  # sync: the device's last work belongs to the window
            torch.cuda.profiler.stop()
        elif self._kind == "torch":
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler = None
        else:
            assert self._path is not None, "checked when the tracer was made"
            trace = {"traceEvents": self._events, "displayTimeUnit": "ms"}
            self._path.write_text(json.dumps(trace) + "\n", encoding="utf-8")

    def _open_if_due(self) -> None:
        if self._step != self._start_step:
            return
        self._is_open = True
        if self._kind == "cuda":
            torch.cuda.synchronize()  # sync: earlier work stays out of the window
            torch.cuda.profiler.start()
        elif self._kind == "torch":
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            self._engine.ranges.opener = _torch_range
        else:
            self._engine.ranges.opener = self._own_range

    @contextmanager
    def _own_range(self, name: str, num_tokens: int, bucket: int) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "ts": start / 1e3,
                    "dur": (time.perf_counter_ns() - start) / 1e3,
                    "pid": 0,
                    "tid": 0,
                    "args": {"tokens": num_tokens, "bucket": bucket},
                }
            )

    def _add_counters(self, batch: ScheduledBatch) -> None:
        scheduler = self._engine.scheduler
        counters = {
            "tokens": {
                "decodes": batch.num_decodes,
                "prompt": batch.num_tokens - batch.num_decodes,
                "padding": batch.bucket - batch.num_tokens if batch.bucket else 0,
            },
            "sequences": {"running": scheduler.num_running, "waiting": scheduler.num_waiting},
            "free blocks": {"free": self._engine.num_free_blocks},
        }
        now = time.perf_counter_ns() / 1e3
        for name, values in counters.items():
            self._events.append({"name": name, "ph": "C", "ts": now, "pid": 0, "args": values})


def _torch_range(name: str, num_tokens: int, bucket: int) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(label(name, num_tokens, bucket))
