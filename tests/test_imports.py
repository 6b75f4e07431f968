"""What importing the packages does to a fresh interpreter, and what is shipped with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent

IMPORT_ALL = """
import sys
for name in ("flash_attn", "flashinfer", "triton"):
    sys.modules[name] = None  # importing it raises ImportError
import runtime, graphs, attention
for package in (runtime, graphs, attention):
    assert package.__all__
    for name in package.__all__:
        getattr(package, name)
import torch
assert not torch.cuda.is_initialized()
slow = {"transformers", "gguf", "huggingface_hub"} & sys.modules.keys()
assert not slow, slow
"""

IMPORT_POLICY = """
import sys
import runtime.scheduler
assert "torch" not in sys.modules
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in the repository's root."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(IMPORT_ALL, id="all_public_names_without_kernels_cuda_or_slow_libraries"),
        pytest.param(IMPORT_POLICY, id="scheduler_without_torch"),
    ],
)
def test_imports_work_in_a_fresh_interpreter(program: str) -> None:
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr


def test_command_line_tool_shows_the_environment() -> None:
    result = run_python("-m", "runtime", "env")
    assert result.returncode == 0, result.stderr
    assert "STEPGRAPH_LOG_LEVEL = " in result.stdout


@pytest.mark.parametrize("package", ["attention", "graphs", "runtime"])
def test_package_ships_its_type_information(package: str) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in pyproject["tool"]["setuptools"]["package-data"][package]
    assert (ROOT / package / "py.typed").is_file()
