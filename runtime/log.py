"""Logging of the stepgraph loggers."""

from __future__ import annotations

import logging

from .environment import read_environment


def configure_logging(default_level: str = "warning") -> None:
    """Set the level of the "stepgraph" logger from STEPGRAPH_LOG_LEVEL, and a handler if needed.

    A program that has configured logging itself keeps its handlers; one that hasn't gets plain
    lines on standard error.
    """
    logger = logging.getLogger("stepgraph")
    level = read_environment().get("STEPGRAPH_LOG_LEVEL")
    if level is not None or logger.level == logging.NOTSET:
        logger.setLevel((level or default_level).upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
