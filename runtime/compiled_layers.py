"""A decoder's compiled regions: warm before the first request, and kept on disk for the next start.

What is kept lies in one directory per key, which covers everything that compiled code depends on.
It is made whole or not at all, and lists the hashes of its files: one that doesn't agree with its
list is removed and made anew, before anything of it is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphs import RegionCompiler

from .errors import ModelLoadError
from .model_cache import build_directory_once, hash_file
from .models import Decoder, Regions
from .models.decoder import between

logger = logging.getLogger("stepgraph.runtime")

_LIST = "files.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLayers:
    """A decoder's compiled regions, or why there are none."""

    regions: Regions | None = None
    """None: nothing is compiled."""
    compiler: RegionCompiler | None = None
    """Of the regions."""
    reason: str | None = None
    """Why nothing is compiled, where that was not asked for."""

    def as_dict(self) -> dict[str, Any]:
        """The statistics in JSON's types."""
        regions = {} if self.compiler is None else self.compiler.statistics
        return {
            "enabled": self.compiler is not None,
            "reason": self.reason,
            "regions": {name: dataclasses.asdict(value) for name, value in regions.items()},
        }


def compile_layers(
    decoder: Decoder,
    *,
    max_tokens: int,
    cache_dir: Path,
    new_compiler: Callable[[Path | None], RegionCompiler] | None = None,
) -> CompiledLayers:
    """Compile a decoder's regions and run them once, so that no request waits for it.

    Where they can't be compiled a warning says why, and there are none.

    Args:
        decoder: with all its weights in place.
        max_tokens: of the largest step.
        cache_dir: compiled code is kept in a directory below it.
        new_compiler: makes the compiler for a directory.
    """
    new_compiler = new_compiler or (lambda path: RegionCompiler(cache_dir=path))
    start = time.perf_counter()

    def compile_into(path: Path | None) -> CompiledLayers:
        compiler = new_compiler(path)
        regions = Regions(
            enter=compiler.compile(Decoder.enter),
            between=compiler.compile(between),
            leave=compiler.compile(Decoder.leave),
        )
        _warm_up(decoder, regions, compiler, max_tokens)
        if not any(region.num_compilations for region in compiler.statistics.values()):
            raise RuntimeError("torch.compile compiled nothing; is a stance set?")
        return CompiledLayers(regions=regions, compiler=compiler)

    try:
        layers = _compile_once(cache_dir / "compiled" / _key(decoder, max_tokens), compile_into)
    except RuntimeError as error:  # of the compiler's kinds too
        reason = _summary(error)
        logger.warning("layers can't be compiled and run uncompiled: %s", reason)
        return CompiledLayers(reason=reason)
    assert layers.compiler is not None
    totals = layers.compiler.statistics.values()
    logger.info(
        "compiled layers: %d compilations of %d regions, %d found in the cache, %.1f s; "
        "%.1f s with tracing and warm-up",
        *(sum(total.num_compilations for total in totals), len(totals)),
        *(sum(total.num_cache_hits for total in totals), sum(total.seconds for total in totals)),
        time.perf_counter() - start,
    )
    return layers


def _warm_up(decoder: Decoder, regions: Regions, compiler: RegionCompiler, max_tokens: int) -> None:
    """Run forwards of made-up tokens, without attention: many first, from which sizes are taken."""
    device = decoder.norm.device

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return torch.zeros(query.shape, dtype=query.dtype, device=device)

    def forward(num_tokens: int) -> None:
        # Made outside of inference mode like a batch's, since compiled code tells the kinds apart.
        input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        with torch.inference_mode():
            decoder(input_ids, positions, attend, regions)

    for num_tokens in dict.fromkeys((max_tokens, 1)):
        forward(num_tokens)
    compiler.finish_warm_up()
    forward(min(2, max_tokens))


def _summary(error: RuntimeError) -> str:
    """What went wrong, without commands and advice; the C++ compiler's first error if it is one."""
    cause = getattr(error, "inner_exception", error)
    text = str(cause)
    found = re.search(r"\berror: .*", text)
    return " ".join([type(cause).__name__ + ":", *(found[0] if found else text[:200]).split()])


# -- what is kept on disk -------------------------------------------------------------------


def _compile_once(
    directory: Path, compile_into: Callable[[Path | None], CompiledLayers]
) -> CompiledLayers:
    """Compile into a directory that isn't there yet, or from one that is."""
    made: list[CompiledLayers] = []

    def build(path: Path) -> None:
        made.append(compile_into(path))
        (path / _LIST).write_text(json.dumps(_hashes(path)))

    try:
        if directory.exists() and not _is_whole(directory):
            logger.warning("removing %s, whose compiled code is damaged", directory)
            shutil.rmtree(directory)
        build_directory_once(directory, build, required=(_LIST,))
    except (OSError, ModelLoadError) as error:
        logger.warning("compiled code can't be kept for the next start: %s", error)
        return made[0] if made else compile_into(None)
    return made[0] if made else compile_into(directory)


def _hashes(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hash_file(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def _is_whole(directory: Path) -> bool:
    """Whether every file of the list is as it was; files that came later are Inductor's."""
    try:
        wanted = json.loads((directory / _LIST).read_text())
        return all(hash_file(directory / name) == digest for name, digest in wanted.items())
    except (OSError, ValueError, AttributeError):
        return False


def _key(decoder: Decoder, max_tokens: int) -> str:
    """Names everything that the compiled code depends on: model, versions, machine, sizes."""
    device = decoder.norm.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine = f"{properties.name} {properties.major}.{properties.minor}"
    else:
        machine = f"{_cpu()} {torch.get_num_threads()} threads"
    sources = sorted((Path(__file__).parent / "models").glob("*.py"))
    facts = (
        *(decoder.config, decoder.norm.dtype, type(decoder.layers[0].qkv_weight)),
        *(max_tokens, machine),
        *(sys.version, torch.__version__, torch.version.git_version, torch.version.cuda),
        *(hash_file(source) for source in sources),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """The CPU's name and its instructions, all of which compiled code may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
