"""Threads for the cores that a process may use, from the files by which a system tells them."""

from __future__ import annotations

import pytest
import torch

from runtime import LLM, cpu_threads
from runtime.cpu_threads import cpu_quota, limit_threads, num_cores


def write(system, files):
    for name, text in files.items():
        path = system / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_siblings_of_one_core_count_once_and_unknown_cpus_each_by_itself(tmp_path):
    for cpu, (package, core) in enumerate([(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 0)]):
        folder = f"devices/system/cpu/cpu{cpu}/topology"
        values = {f"{folder}/physical_package_id": str(package), f"{folder}/core_id": str(core)}
        write(tmp_path, values)
    assert num_cores(range(6), tmp_path) == 3
    assert num_cores([1, 3], tmp_path) == 1
    assert num_cores([0, 7, 8], tmp_path) == 3


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"fs/cgroup/cpu.max": "max 100000"}, None),
        ({"fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        ({"fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"fs/cgroup/cpu.max": "nonsense"}, None),
        (
            {"fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
        (
            {"fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "fs/cgroup/cpu/cpu.cfs_period_us": "1000"},
            300.0,
        ),
    ],
)
def test_quotas_of_both_versions_of_control_groups_are_read(tmp_path, files, quota):
    write(tmp_path, files)
    assert cpu_quota(tmp_path) == quota


@pytest.fixture
def threads(monkeypatch):
    """Torch with four threads, nothing set from outside; its number is as before at the end."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    yield monkeypatch
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "quota", "expected"),
    [(2, None, 2), (8, None, 4), (3, 2.5, 2), (3, 0.5, 1), (8, 16.0, 4)],
)
def test_threads_are_lowered_to_cores_and_quota_and_never_raised(
    threads, caplog, cores, quota, expected
):
    threads.setattr(cpu_threads, "num_cores", lambda cpus: cores)
    threads.setattr(cpu_threads, "cpu_quota", lambda: quota)
    caplog.set_level("INFO", logger="stepgraph.runtime")
    limit_threads()
    assert torch.get_num_threads() == expected
    assert f"threads: {expected} (torch had 4; the process may use {cores} cores" in caplog.text
    assert ("and the time of" in caplog.text) == (quota is not None)


def test_a_number_that_is_set_from_outside_stands(threads, caplog, checkpoint):
    threads.setenv("OMP_NUM_THREADS", "4")
    threads.setattr(cpu_threads, "num_cores", lambda cpus: 1)
    caplog.set_level("INFO", logger="stepgraph.runtime")
    with LLM(checkpoint("llama"), max_model_len=64, max_num_seqs=2):
        assert torch.get_num_threads() == 4
    assert "threads: 4 (OMP_NUM_THREADS" in caplog.text


def test_an_engine_on_a_cpu_lowers_them(threads, checkpoint):
    threads.setattr(cpu_threads, "num_cores", lambda cpus: 1)
    with LLM(checkpoint("llama"), max_model_len=64, max_num_seqs=2):
        assert torch.get_num_threads() == 1
