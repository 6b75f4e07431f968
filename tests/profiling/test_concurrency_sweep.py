"""The sweep over numbers of sequences on a tiny model."""

from __future__ import annotations

import json
import sys

import concurrency_sweep
import plots


def test_each_number_of_sequences_has_a_line_and_a_point(monkeypatch, capsys, tmp_path, checkpoint):
    picture, values = tmp_path / "sweep.png", tmp_path / "sweep.json"
    command = ["concurrency_sweep.py", "--model", str(checkpoint("llama")), "--rounds", "2"]
    options = ["--sequences", "3", "1", "--inputs", "5", "--outputs", "4"]
    files = ["--plot", str(picture), "--json", str(values)]
    monkeypatch.setattr(sys, "argv", command + options + files)
    concurrency_sweep.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "sequences:"], ["3", "sequences:"]]
    speeds = json.loads(values.read_text())
    assert {count: len(of_count) for count, of_count in speeds.items()} == {"1": 2, "3": 2}
    assert min(map(min, speeds.values())) > 0
    assert picture.exists() == (plots.pyplot() is not None)
