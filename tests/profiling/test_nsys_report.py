"""The report of ranges and device work, from files as nsys and torch.profiler write them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import nsys_report
import pytest
from range_report import heaviest_kernels, summarise, table

# Names and columns of the SQLite schema that Nsight Systems documents; columns that the report
# doesn't read are left out where there are many.
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL,
    uint32Value INTEGER, int32Value INTEGER, floatValue REAL
);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL
);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,
    graphNodeId INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, graphNodeId INTEGER
);
"""
GRAPH_TRACE = """
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL
);
"""
PROCESS = 77 << 24
THREAD = PROCESS | 5
NAMES = {
    1: "forward",
    2: "cudaLaunchKernel_v7000",
    3: "cudaGraphLaunch_v10000",
    4: "gemm",
    5: "norm",
}


class NsysFile:
    """Fills a file row by row; times in microseconds."""

    def __init__(self, path: Path, schema: str = SCHEMA) -> None:
        self.path = path
        self._database = sqlite3.connect(path)
        self._database.executescript(schema)
        self._insert("StringIds", *({"id": i, "value": v} for i, v in NAMES.items()))
        self.nvtx(0, None, "stepgraph", event_type=75, domain=3)
        self._correlation = 0

    def _insert(self, table: str, *rows: dict) -> None:
        for row in rows:
            names, marks = ", ".join(row), ", ".join("?" * len(row))
            self._database.execute(
                f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(row.values())
            )

    def nvtx(self, start, end, text, *, event_type=59, domain=3, bucket=None, tokens=None) -> None:
        """By text, or by the id of a registered string."""
        named = {"textId": text} if isinstance(text, int) else {"text": text}
        self._insert(
            "NVTX_EVENTS",
            {
                "start": 1000 * start,
                "end": None if end is None else 1000 * end,
                "eventType": event_type,
                "globalTid": THREAD,
                "domainId": domain,
                "category": bucket,
                "int64Value": tokens,
                **named,
            },
        )

    def launch(self, start, end, work, *, name=2, thread=THREAD, table="KERNEL") -> None:
        """A call of the host, and what it ran: (start, end, name) each."""
        self._correlation += 1
        call = {"start": 1000 * start, "end": 1000 * end, "eventClass": 0, "globalTid": thread}
        call |= {"correlationId": self._correlation, "nameId": name, "returnValue": 0}
        self._insert("CUPTI_ACTIVITY_KIND_RUNTIME", call)
        extra = {
            "KERNEL": lambda kernel: {"demangledName": kernel, "shortName": kernel},
            "MEMCPY": lambda _: {"bytes": 4, "copyKind": 1},
            "GRAPH_TRACE": lambda _: {"graphId": 1, "graphExecId": 1},
        }[table]
        for begins, ends, kernel in work:
            row = {"start": 1000 * begins, "end": 1000 * ends, "deviceId": 0, "contextId": 1}
            row |= {"streamId": 7, "correlationId": self._correlation, "globalPid": PROCESS}
            self._insert(f"CUPTI_ACTIVITY_KIND_{table}", row | extra(kernel))

    def close(self) -> Path:
        self._database.commit()
        self._database.close()
        return self.path


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Two decode steps under a graph, one mixed step without, and what must not count."""
    file = NsysFile(tmp_path / "run.sqlite")
    file.nvtx(0, 10, "pack", tokens=8)
    file.launch(2, 4, [(5, 9, 0)], table="MEMCPY")
    for start in (100, 200):
        file.nvtx(start, start + 30, 1, bucket=8, tokens=6)
        # Two kernels that overlap, a pause of 10, and a third.
        work = [
            (start + 20, start + 40, 4),
            (start + 30, start + 50, 5),
            (start + 60, start + 70, 4),
        ]
        file.launch(start + 5, start + 15, work, name=3)
    file.nvtx(300, 400, 1, tokens=100)
    file.launch(310, 312, [(320, 340, 4)])
    file.launch(320, 324, [(345, 355, 4)])
    file.launch(330, 331, [])  # cudaStreamSynchronize and the like launch nothing
    file.launch(340, 345, [(360, 365, 5)], thread=THREAD + 1)  # another thread's
    file.launch(450, 455, [(460, 465, 5)])  # outside all ranges
    file.nvtx(300, 400, "other", domain=9, tokens=1)
    file.nvtx(300, None, "open", tokens=1)  # never closed
    return file.close()


def test_each_range_and_bucket_has_its_host_and_device_times(report):
    summaries = summarise(nsys_report.read_nsys(report))
    found = {(s.name, s.bucket): s for s in summaries}
    assert list(found) == [("pack", 0), ("forward", 0), ("forward", 8)]
    decode, mixed = found["forward", 8], found["forward", 0]
    assert (decode.count, decode.num_tokens, decode.host) == (2, 6, 30)
    assert (decode.num_launches, decode.launching, decode.launching_graphs) == (1, 10, 10)
    assert (decode.busy, decode.gaps, decode.kernel_share) == (40, 10, 1)
    assert (mixed.count, mixed.num_tokens, mixed.host) == (1, 100, 100)
    assert (mixed.num_launches, mixed.launching, mixed.launching_graphs) == (2, 6, 0)
    assert (mixed.busy, mixed.gaps) == (30, 5)
    pack = found["pack", 0]
    assert (pack.busy, pack.gaps, pack.kernel_share, pack.launching) == (4, 0, 0, 2)


def test_graphs_traced_as_a_whole_count_as_device_time(tmp_path):
    file = NsysFile(tmp_path / "run.sqlite", SCHEMA + GRAPH_TRACE)
    file.nvtx(0, 30, 1, bucket=8, tokens=6)
    file.launch(5, 15, [(20, 60, 0)], name=3, table="GRAPH_TRACE")
    file.nvtx(100, 130, 1, bucket=8, tokens=6)
    file.launch(105, 115, [(0, 0, 0)], name=3, table="GRAPH_TRACE")  # without times
    [forward] = summarise(nsys_report.read_nsys(file.close()))
    assert (forward.busy, forward.gaps, forward.kernel_share) == (20, 0, 1)


def test_steps_whose_names_tell_counts_are_one_range(tmp_path):
    file = NsysFile(tmp_path / "run.sqlite")
    for start, tokens in ((0, 5), (100, 9)):
        file.nvtx(start, start + 40, f"step: {tokens} tokens, 2 sequences", tokens=tokens)
        file.nvtx(start + 10, start + 30, 1, tokens=tokens)
        file.launch(start + 15, start + 16, [(start + 20, start + 25, 4)])
    step, forward = summarise(nsys_report.read_nsys(file.close()))
    assert (step.name, step.count, step.num_tokens) == ("step", 2, 7.0)
    assert (forward.name, forward.count) == ("forward", 2)
    assert step.num_launches == forward.num_launches == 1, "nested ranges both hold the launch"


def test_heaviest_kernels_come_first(report):
    trace = nsys_report.read_nsys(report)
    assert heaviest_kernels(trace, 5) == [("gemm", 6, 0.09), ("norm", 4, 0.05)]
    assert len(heaviest_kernels(trace, 1)) == 1


def test_files_without_device_tables_have_host_times_alone(tmp_path):
    file = NsysFile(tmp_path / "run.sqlite", SCHEMA.split("CREATE TABLE CUPTI")[0])
    file.nvtx(0, 30, 1, tokens=6)
    [forward] = summarise(nsys_report.read_nsys(file.close()))
    assert (forward.host, forward.busy, forward.num_launches) == (30, 0, 0)
    assert "| forward | - | 1 | 6.0 | 30.0 | 0.0 |" in table([forward])
    assert table([forward]).endswith("| - |")


def test_files_without_ranges_of_the_domain_are_refused(report):
    with pytest.raises(ValueError, match="no NVTX range of the domain 'vllm'"):
        nsys_report.read_nsys(report, "vllm")


def torch_trace(path: Path) -> Path:
    """What torch.profiler writes for a step that launches a graph of two kernels."""

    def event(kind: str, name: str, ts: float, dur: float, **args) -> dict:
        return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": 9, "args": args}

    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("user_annotation", "forward tokens=6 bucket=8", 0, 30),
        event("user_annotation", "ProfilerStep#1", 0, 40),
        event("cuda_runtime", "cudaGraphLaunch", 5, 10, correlation=1),
        event("kernel", "gemm", 20, 20, correlation=1),
        event("kernel", "norm", 50, 10, correlation=1),
        event("gpu_user_annotation", "forward tokens=6 bucket=8", 20, 40),
        event("cpu_op", "aten::mm", 1, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 16, 1, correlation=2),
        event("gpu_memcpy", "Memcpy HtoD", 62, 10, correlation=2),
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_of_torch_profiler_gives_the_same_report(tmp_path):
    [forward] = summarise(nsys_report.read_torch(torch_trace(tmp_path / "trace.json")))
    assert (forward.name, forward.bucket, forward.num_tokens, forward.host) == ("forward", 8, 6, 30)
    assert (forward.num_launches, forward.launching, forward.launching_graphs) == (2, 11, 10)
    assert (forward.busy, forward.gaps, forward.kernel_share) == (40, 12, 0.75)


def test_a_torch_trace_without_labels_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ValueError, match="no labelled range"):
        nsys_report.read_torch(path)


def test_command_line_reads_both_kinds_of_file(report, tmp_path, monkeypatch, capsys):
    for path in (report, torch_trace(tmp_path / "trace.json")):
        monkeypatch.setattr(sys, "argv", ["nsys_report.py", str(path), "--kernels", "1"])
        nsys_report.main()
        out = capsys.readouterr().out
        assert "| forward | 8 |" in out and "| gemm |" in out and "| norm |" not in out


def test_wrapper_says_what_is_missing(tmp_path):
    script = Path(nsys_report.__file__).with_name("nsys_profile.sh")
    environment = {"PATH": "/usr/bin:/bin"}
    usage = subprocess.run(["bash", script], capture_output=True, text=True, env=environment)
    assert usage.returncode == 2 and "usage:" in usage.stderr
    absent = subprocess.run(
        ["/bin/bash", script, "out", "true"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert absent.returncode == 127 and "nsys is not installed" in absent.stderr


def test_wrapper_profiles_exports_and_reports(report, tmp_path):
    """With a stand-in for nsys that writes down its arguments and makes the files."""
    script = Path(nsys_report.__file__).with_name("nsys_profile.sh")
    fake = tmp_path / "bin" / "nsys"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/bash\necho "$STEPGRAPH_NVTX $@" >> {tmp_path}/calls\n'
        f'if [ "$1" = export ]; then cp {report} {tmp_path}/out.sqlite; fi\n'
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", script, str(tmp_path / "out"), "python", "x.py", "--trace", "cuda"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{fake.parent}:/usr/bin:/bin", "PYTHON": sys.executable},
    )
    profile, export = (tmp_path / "calls").read_text().splitlines()
    assert profile.startswith("1 profile ") and profile.endswith("python x.py --trace cuda")
    for flag in ("cuda,nvtx,osrt", "cuda-graph-trace=node", "capture-range=cudaProfilerApi"):
        assert flag in profile
    assert "export --type=sqlite" in export
    assert "| forward | 8 | 2 |" in done.stdout
