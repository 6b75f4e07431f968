"""Directories made once and reused: nobody ever sees a half-made one, whatever dies meanwhile."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import ModelLoadError

logger = logging.getLogger("stepgraph.runtime")


def build_directory_once(
    directory: Path, build: Callable[[Path], None], *, required: Sequence[str]
) -> Path:
    """Return `directory`, made by `build` unless it already holds every file named in `required`.

    `build` gets an empty directory beside `directory`; when it returns, what it made is flushed to
    disk and renamed into place, so `directory` appears complete or not at all. A lock file lets one
    process build while others wait for its result. The system drops the lock of a killed process,
    so what the holder of the lock finds half-made belongs to no one and is removed.

    Errors of the file system become ModelLoadError; what else `build` raises passes through.
    """
    from filelock import FileLock

    if _holds(directory, required):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{directory}.lock"):
            if not _holds(directory, required):
                _build(directory, build)
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
        raise ModelLoadError(
            f"{directory} could not be made: {error}. "
            "Choose a cache directory that is writable and has space for the weights."
        ) from error
    return directory


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _holds(directory: Path, required: Sequence[str]) -> bool:
    return all((directory / name).is_file() for name in required)


def _build(directory: Path, build: Callable[[Path], None]) -> None:
    """Make `directory`; the caller holds its lock."""
    partial = directory.with_name(directory.name + ".partial")
    for remains in (partial, directory):
        if remains.exists():
            logger.warning("removing %s, which is incomplete", remains)
            shutil.rmtree(remains)
    partial.mkdir()
    try:
        build(partial)
        _flush_tree(partial)
        partial.rename(directory)
    except BaseException:  # also an interrupt from the keyboard
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush(directory.parent)


def _flush_tree(directory: Path) -> None:
    """Flush every file and directory below, so that a rename never survives what it names."""
    for folder, _, names in os.walk(directory):
        for name in names:
            _flush(Path(folder) / name)
        _flush(Path(folder))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
