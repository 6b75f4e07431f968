"""The script for the host's planning time runs where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_prints_a_line_for_each_way_of_planning() -> None:
    done = subprocess.run(
        [sys.executable, "profiling/plan_cost.py", "--seqs", "4", "--steps", "3"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "", "no fallback was taken"
    _, head, *lines = done.stdout.splitlines()
    assert head.split()[:2] == ["sequences", "way"]
    assert [line.split()[:2] for line in lines] == [
        ["4", w] for w in ("captured", "eager", "mixed")
    ]
    assert all(float(number) >= 0 for line in lines for number in line.split()[2:])
