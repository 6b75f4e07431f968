"""The tables of how steps were launched."""

from __future__ import annotations

import json

from graphs import Launch, StepStatistics
from graphs.step_statistics import CaptureStatistics


def counted() -> StepStatistics:
    statistics = StepStatistics()
    full = Launch(mode="full", size=8)
    for num_seqs in (5, 7, 5):
        statistics.count(full, num_seqs, is_uniform_decode=True)
        statistics.add_seconds(full, 0.002)
    statistics.count(Launch(mode="piecewise", size=32), 20, is_uniform_decode=False)
    eager = Launch(mode="eager", size=90, fall="above the largest size")
    statistics.count(eager, 90, is_uniform_decode=False)
    statistics.add_seconds(eager, 0.5)
    for late in (False, True):
        statistics.captures.append(
            CaptureStatistics(mode="full", size=8, seconds=0.25, at_first_use=late)
        )
    return statistics


def test_step_sizes_are_counted_by_kind_before_padding():
    table = json.loads(json.dumps(counted().as_dict()))
    assert table["step_sizes"] == {"decode": [[5, 2], [7, 1]], "mixed": [[20, 1], [90, 1]]}
    assert [(b["mode"], b["size"], b["steps"]) for b in table["buckets"]] == [
        ("eager", 0, 1),
        ("full", 8, 3),
        ("piecewise", 32, 1),
    ]
    full = table["buckets"][1]
    assert (full["num_tokens"], full["num_padded_tokens"], full["num_timed_steps"]) == (17, 7, 3)
    assert table["falls"] == {"above the largest size": 1}
    assert [c["at_first_use"] for c in table["captures"]] == [False, True]


def test_the_readable_table_has_every_bucket_fall_and_capture():
    assert counted().table().splitlines() == [
        "mode         size    steps     tokens  padding   ms/step",
        "eager           -        1         90     0.0%    500.00",
        "full            8        3         17    29.2%      2.00",
        "piecewise      32        1         20    37.5%         -",
        "1 steps without a graph: above the largest size",
        "2 captures took 0.50 s, 1 at first use",
    ]
    assert StepStatistics().table().count("\n") == 0
