"""The script for the cost of structured outputs runs on any model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_prints_a_line_for_each_form_and_number_of_rows(checkpoint) -> None:
    script = "profiling/grammar_cost.py"
    done = subprocess.run(
        [sys.executable, script, "--model", checkpoint("llama"), "--rows", "1", "3", "--steps=4"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    first, head, *lines = done.stdout.splitlines()
    assert "300 tokens" in first
    assert head.split()[:3] == ["form", "compile", "rows"]
    assert len(lines) == 2 * 5
    assert all(float(number) >= 0 for line in lines for number in line.split()[-6:])
    assert [line.split()[-5] for line in lines] == ["1", "3"] * 5
