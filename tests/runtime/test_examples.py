"""Each example program runs to its end, on a tiny model always and on the real one when asked."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import runtime.examples

ROOT = Path(runtime.examples.__file__).parents[2]
SHOWN = {
    "chat": "assistant: The capital is",
    "offline_batch": "cached: ",
    "profiling": " steps, 48 tokens of output",
    "streaming": "requests by reason: ",
    "structured_output": "the person's age: ",
}


def test_every_example_is_run_here() -> None:
    found = {module.name for module in pkgutil.iter_modules(runtime.examples.__path__)}
    assert found == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs_on_any_model(name, checkpoint, capsys) -> None:
    module = importlib.import_module(f"runtime.examples.{name}")
    module.main(["--model", str(checkpoint("llama"))])
    assert SHOWN[name] in capsys.readouterr().out


def test_the_readme_names_each_example() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"runtime.examples.{name}" in readme for name in SHOWN)


def test_the_readmes_structured_output_is_one(checkpoint, capsys) -> None:
    section = (ROOT / "README.md").read_text().split("### Structured outputs")[1]
    code = (
        section.split("```python\n")[1]
        .split("```")[0]
        .replace('"smollm2-135m-instruct"', f"{str(checkpoint('llama'))!r}, max_model_len=256")
    )
    exec(compile(code, "README.md", "exec"), {})
    assert 0 <= json.loads(capsys.readouterr().out)["age"] <= 120


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs_as_the_readme_says(name, smollm2) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"runtime.examples.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert SHOWN[name] in done.stdout
