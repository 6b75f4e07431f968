"""Builds native C++ libraries at first use, and keeps them in the user's cache.

A library has a plain C interface, so it needs neither torch's headers nor its libraries and
compiles in seconds. It is built per level of vector instructions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

COMMON_HEADERS = Path(__file__).parent / "csrc"
"""Directory of headers that all libraries may include."""
_COMMON_FLAGS = (
    *("-std=gnu++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"),
)
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_SECONDS = 300
# GNU's entry point for a parallel region; LLVM's and Intel's runtimes offer it too.
_OPENMP_SYMBOL = "GOMP_parallel"
# at::native::cpublas::brgemm for bfloat16, and brgemm_release.
_MATRIX_SYMBOLS = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
)


class NativeBuildError(RuntimeError):
    """The library can't be had here; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSource:
    """What one library is compiled from."""

    name: str
    """Of the library."""
    file: Path
    """The only translation unit; headers lie beside it and in COMMON_HEADERS."""


ATTENTION_SOURCE = NativeSource(
    name="attention", file=Path(__file__).parent / "csrc" / "native_attention.cpp"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level of vector instructions: what the compiler may use and what the CPU must have."""

    name: str
    flags: tuple[str, ...]  # for the compiler
    cpu_flags: frozenset[str]  # as /proc/cpuinfo names them


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
)
_AVX2_CPU = frozenset({"avx2", "fma", "f16c"})
_AVX512_CPU = _AVX2_CPU | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

LEVELS: tuple[Level, ...] = (
    Level(
        name="amx",
        flags=(*_AVX512, "-mavx512bf16", "-DSTEPGRAPH_MATRIX_KERNEL"),
        cpu_flags=_AVX512_CPU | {"avx512_bf16", "amx_tile", "amx_bf16"},
    ),
    Level(
        name="avx512_bf16",
        flags=(*_AVX512, "-mavx512bf16", "-mavx512vnni"),
        cpu_flags=_AVX512_CPU | {"avx512_bf16", "avx512_vnni"},
    ),
    Level(name="avx512", flags=_AVX512, cpu_flags=_AVX512_CPU),
    Level(name="avx2", flags=_AVX2, cpu_flags=_AVX2_CPU),
    Level(name="generic", flags=(), cpu_flags=frozenset()),
)
"""The best one first. Generic is the baseline of the compiler's target."""


@functools.cache
def usable_levels() -> tuple[str, ...]:
    """Names of the levels that this CPU can run, the best one first."""
    features = _cpu_features()
    return tuple(level.name for level in LEVELS if level.cpu_flags <= features)


def _cpu_features() -> frozenset[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def cache_directory() -> Path:
    """Where libraries are kept unless told otherwise: stepgraph in the user's cache.

    The runtime has a twin of this for models, which must not import torch as this package does.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    # The base directory specification says that a relative path there is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "stepgraph"


def find_compiler() -> list[str]:
    """The C++ compiler's command: CXX if it is set, else the first one on the path.

    Raises NativeBuildError if there is none.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [path, *wanted[1:]]
    if wanted:
        raise NativeBuildError(f"the C++ compiler that CXX names, {wanted[0]!r}, was not found")
    raise NativeBuildError(
        f"no C++ compiler was found (install one, or name it in CXX; tried {', '.join(_COMPILERS)})"
    )


def build_library(source: NativeSource, level: str, *, cache_dir: Path | None = None) -> Path:
    """Return the path of a library for a level, compiling it unless the cache holds it.

    It is found under a hash of the sources, the compiler and its version, and the flags.
    Several processes may build at once: each one compiles, and the last one's file stays.

    Args:
        source: which library.
        level: a name from LEVELS.
        cache_dir: where it is kept; None means cache_directory().

    Raises:
        NativeBuildError: no compiler, a failed compilation, or a cache that can't be written.
    """
    (flags,) = [known.flags for known in LEVELS if known.name == level]
    command = [*find_compiler(), *_COMMON_FLAGS, *flags]
    directory = (cache_directory() if cache_dir is None else cache_dir) / "native"
    key = _build_key(command, source)
    path = directory / f"{source.name}-{level}-{key}.so"
    if path.exists():
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as scratch:
            made = Path(scratch) / path.name
            _run([*command, f"-I{COMMON_HEADERS}", str(source.file), "-o", str(made)])
            made.replace(path)
    except OSError as error:
        raise NativeBuildError(
            f"the compiled library can't be kept in {directory} ({error.strerror})"
        ) from error
    return path


def _build_key(command: list[str], source: NativeSource) -> str:
    digest = hashlib.sha256()
    for directory in dict.fromkeys((source.file.parent, COMMON_HEADERS)):
        for file in sorted(directory.iterdir()):
            if file.suffix == ".h" or file == source.file:
                digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    version = _run([command[0], "--version"])
    digest.update("\0".join([*command, version]).encode())
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line.lower()]
        detail = (lines or error.stderr.splitlines() or ["no message"])[0].strip()
        raise NativeBuildError(
            f"the C++ compiler {command[0]} failed with exit status {error.returncode} ({detail})"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(
            f"the C++ compiler {command[0]} took longer than {_TIMEOUT_SECONDS} seconds"
        ) from error
    except OSError as error:
        raise NativeBuildError(
            f"the C++ compiler {command[0]} can't be run ({error.strerror})"
        ) from error
    return done.stdout


@functools.cache
def usable_library(source: NativeSource, level: str, cache_dir: Path | None = None) -> str:
    """Path of a library for a level, built if need be and known to load.

    Raises NativeBuildError like build_library and load_library.
    """
    path = str(build_library(source, level, cache_dir=cache_dir))
    load_library(path)
    return path


@functools.cache
def load_library(path: str) -> ctypes.CDLL:
    """Load a library that build_library made, and connect it to torch.

    Raises NativeBuildError if it can't be loaded, and if torch doesn't run on OpenMP.
    """
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    openmp = _address(torch_library, _OPENMP_SYMBOL)
    if openmp is None:
        raise NativeBuildError(f"torch doesn't run its threads with OpenMP (no {_OPENMP_SYMBOL})")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise NativeBuildError(f"the compiled library can't be loaded ({error})") from error
    library.stepgraph_use_openmp(openmp)
    if hasattr(library, "stepgraph_use_matrix_kernel"):  # else it has no use for one
        kernel = [_address(torch_library, name) for name in _MATRIX_SYMBOLS]
        if None not in kernel and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            library.stepgraph_use_matrix_kernel(*kernel)
    return library


def _address(library: ctypes.CDLL, symbol: str) -> ctypes.c_void_p | None:
    function = getattr(library, symbol, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p)
