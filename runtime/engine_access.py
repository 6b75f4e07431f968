"""What LLM offers of its engine besides requests."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from .engine import Engine
from .metrics import EngineMetrics


class EngineAccess(ABC):
    """Methods of a class that has an engine."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine underneath; RuntimeError once closed."""

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of past prompts and outputs."""
        self.engine.reset_prefix_cache()

    def metrics(self) -> EngineMetrics:
        """What the engine has done so far."""
        return self.engine.metrics()

    def stats(self) -> dict[str, Any]:
        """How the steps so far were launched, in JSON's types; see `engine_stats`."""
        return self.engine.stats()

    @property
    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self.engine.is_sleeping

    def sleep(self, level: int = 1) -> None:
        """Give back the KV pool and the graphs (level 1), or the weights too (level 2).

        Until `wake_up` requests are refused with EngineStateError, and so is sleeping while some
        are unfinished. The prefix cache is forgotten. See `ResidencyManager.sleep`.
        """
        self.engine.sleep(level)

    def wake_up(self) -> None:
        """Take back what `sleep` gave back, weights from where they were read last.

        If that fails the error is raised, and the engine sleeps on: it can be tried again.
        """
        self.engine.wake_up()

    def reload_weights(self, path: str | os.PathLike[str] | None = None) -> None:
        """Read other weights of the same model in place; None: the same ones again.

        The prefix cache is forgotten; tokenizer, graphs and compiled layers stay. For arguments
        and errors see `ResidencyManager.reload_weights`.
        """
        self.engine.reload_weights(path)
