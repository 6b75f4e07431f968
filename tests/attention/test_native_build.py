from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention import AttentionSpec, native_build, select_backend
from attention.native_backend import NativeBackend
from attention.native_build import (
    ATTENTION_SOURCE,
    NativeBuildError,
    NativeSource,
    build_library,
    find_compiler,
    usable_levels,
)

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()

try:
    COMPILER = find_compiler()
except NativeBuildError as error:
    pytest.skip(str(error), allow_module_level=True)

SPEC = AttentionSpec(
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    dtype=torch.float32,
    device=torch.device("cpu"),
    block_size=16,
    windows=(None,),
    scale=0.25,
)


@pytest.fixture
def small_source(tmp_path: Path) -> NativeSource:
    """A library that compiles at once."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "main.cpp").write_text('#include "answer.h"\n')
    (folder / "answer.h").write_text("int answer() { return 42; }\n")
    return NativeSource(name="small", file=folder / "main.cpp")


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and no library loaded from another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unmemoized = native_build.usable_library.__wrapped__
    monkeypatch.setattr("attention.native_backend.usable_library", unmemoized)
    return tmp_path / "cache"


def fake_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_second_build_takes_the_first_ones_file(
    small_source: NativeSource, tmp_path: Path
) -> None:
    first = build_library(small_source, "generic", cache_dir=tmp_path)
    built_at = first.stat().st_mtime_ns
    assert build_library(small_source, "generic", cache_dir=tmp_path) == first
    assert first.stat().st_mtime_ns == built_at
    assert [path.name for path in first.parent.iterdir()] == [first.name]


@pytest.mark.parametrize("name", ["main.cpp", "answer.h"])
def test_a_changed_source_builds_another_file(
    small_source: NativeSource, tmp_path: Path, name: str
) -> None:
    first = build_library(small_source, "generic", cache_dir=tmp_path)
    with small_source.file.with_name(name).open("a") as file:
        file.write("// changed\n")
    second = build_library(small_source, "generic", cache_dir=tmp_path)
    assert second != first
    assert second.exists()


def test_another_version_of_the_compiler_builds_another_file(
    small_source: NativeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    paths = set()
    for version in ("1.0", "2.0"):
        script = f'test "$1" = --version && echo {version} && exit; exec {COMPILER[0]} "$@"'
        monkeypatch.setenv("CXX", fake_compiler(compiler, script))
        paths.add(build_library(small_source, "generic", cache_dir=tmp_path))
    assert len(paths) == 2


def test_processes_that_build_at_once_all_get_the_library(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from attention.native_build import ATTENTION_SOURCE, usable_library\n"
        f"usable_library(ATTENTION_SOURCE, 'generic', Path({str(tmp_path)!r}))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env={**os.environ})
        for _ in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert len(list((tmp_path / "native").iterdir())) == 1


def test_a_backend_takes_its_library_from_the_directory_given_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    (given / "native").mkdir(parents=True)
    library = shutil.copy(build_library(ATTENTION_SOURCE, usable_levels()[0]), given / "native")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    backend = select_backend("native", SPEC, cache_dir=given)
    assert isinstance(backend, NativeBackend)
    assert backend.library == str(library)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


@pytest.mark.usefixtures("fresh_cache")
def test_a_compiler_that_fails_is_a_reason_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'test "$1" = --version && exit; echo "x.cpp:1: error: no such thing" >&2; exit 3'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "broken", script))
    (reason,) = NativeBackend.unsupported_reasons(SPEC)
    assert "broken failed with exit status 3 (x.cpp:1: error: no such thing)" in reason


@pytest.mark.usefixtures("fresh_cache")
def test_no_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (reason,) = NativeBackend.unsupported_reasons(SPEC)
    assert reason.startswith("no C++ compiler was found")


@pytest.mark.usefixtures("fresh_cache")
def test_a_compiler_named_in_vain_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    (reason,) = NativeBackend.unsupported_reasons(SPEC)
    assert reason == "the C++ compiler that CXX names, 'no-such-compiler', was not found"


def test_a_cache_that_can_not_be_written_is_a_reason(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_cache.write_text("a file where the directory should be")
    (reason,) = NativeBackend.unsupported_reasons(SPEC)
    assert reason.startswith(f"the compiled library can't be kept in {fresh_cache}")


def test_options_in_cxx_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{COMPILER[0]} -DONE -DTWO")
    assert find_compiler() == [COMPILER[0], "-DONE", "-DTWO"]


@pytest.mark.parametrize(
    ("features", "best"),
    [
        ("fpu sse2", "generic"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma", "generic"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16", "avx512"),
        (
            "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni",
            "avx512_bf16",
        ),
        (
            "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_tile amx_bf16",
            "amx",
        ),
    ],
)
def test_the_best_level_is_one_whose_instructions_the_cpu_has_all(
    monkeypatch: pytest.MonkeyPatch, features: str, best: str
) -> None:
    monkeypatch.setattr(native_build, "_cpu_features", lambda: frozenset(features.split()))
    assert usable_levels.__wrapped__()[0] == best


@pytest.mark.parametrize("package", ["attention", "runtime/models"])
def test_every_source_is_shipped_with_its_package(package: str) -> None:
    data = re.search(rf'^"?{package.replace("/", ".")}"? = (.*)$', PYPROJECT, re.MULTILINE)
    assert data is not None and '"csrc/*.cpp", "csrc/*.h"' in data[1]
    assert {path.suffix for path in (ROOT / package / "csrc").iterdir()} == {".cpp", ".h"}


def test_the_library_brings_no_threads_of_its_own(tmp_path: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    path = build_library(ATTENTION_SOURCE, "generic", cache_dir=tmp_path)
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True)
    assert "gomp" not in needed.stdout
    assert "libomp" not in needed.stdout
