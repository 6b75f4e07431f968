"""What of an engine is in memory: sleeping, waking, and reading weights again."""

from __future__ import annotations

import os
from pathlib import Path

from . import value_checks as checks
from .block_manager import BlockManager
from .errors import EngineStateError
from .model_runner import ModelRunner
from .model_source import resolve_model


class ResidencyManager:
    """Knows whether requests can be served, and changes that between steps, with none in flight.

    Args:
        runner: holds the memory.
        blocks: whose contents are forgotten with it.
        cache_dir: where models are kept that had to be converted.
    """

    def __init__(self, runner: ModelRunner, blocks: BlockManager, cache_dir: Path) -> None:
        self._runner = runner
        self._blocks = blocks
        self._cache_dir = cache_dir
        self._level = 0

    @property
    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self._level > 0

    def check_ready(self) -> None:
        """Raise EngineStateError unless everything that a step needs is there."""
        self._check_awake()
        if not self._runner.has_weights:
            raise EngineStateError(
                "the weights in memory were read only in part; call reload_weights() with a model "
                "that can be read, which may be the one before"
            )

    def sleep(self, level: int) -> None:
        """Give memory back until `wake_up`, and refuse requests meanwhile.

        The prefix cache is forgotten. Buffers that don't grow with the pool or the model are kept.

        Args:
            level: 1: the KV pool and the graphs; 2: the weights too. To sleep again at the same
                level, or at a lower one, does nothing.

        Raises:
            EngineStateError: requests are unfinished.
            InvalidRequestError, TypeError: there is no such level.
        """
        level = checks.integer("level", level, 1, 2)
        if level > self._level:
            self._level = level
            self._blocks.reset_prefix_cache()
            self._runner.sleep(level)

    def wake_up(self) -> None:
        """Take the memory back, of the same size; graphs are captured again.

        Weights that were given back are read again from where they came from last. Does nothing
        when awake. What goes wrong (memory is short, the model's files are gone or are others) is
        raised, and the engine sleeps on: it can be tried again.
        """
        if self._level:
            self._runner.wake_up(self._level)
            self._level = 0

    def reload_weights(self, path: str | os.PathLike[str] | None) -> None:
        """Read other weights of the same model in place, and forget the prefix cache.

        Everything else stays: tokenizer, end tokens, graphs, compiled layers. The dtype stays too,
        as does quantization, which is done anew.

        Args:
            path: what `EngineConfig.model` may be; its config.json must describe the model that
                runs. None: what was read last, again.

        Raises:
            EngineStateError: requests are unfinished, or the engine sleeps.
            ModelLoadError: it can't be read, or is another model. Nothing has changed then, unless
                the error says that reading failed half-way: requests are refused in that case
                until a reload succeeds.
        """
        self._check_awake()
        directory = None if path is None else resolve_model(path, cache_dir=self._cache_dir)
        self._runner.reload_weights(directory)
        self._blocks.reset_prefix_cache()

    def _check_awake(self) -> None:
        if self._level:
            raise EngineStateError("the engine sleeps; call wake_up() first")
