"""Host time, device time, gaps and launch cost of each stage of a step, from a trace.

    python profiling/nsys_report.py REPORT.sqlite      exported by nsys (see nsys.md)
    python profiling/nsys_report.py TRACE.json         written by torch.profiler

Times are means in microseconds. "device busy" is the time in which work that the range launched
ran on the device, "gaps" the time in between; "launching" is the host's time in CUDA calls that
launched something, "of graphs" in those that launched a graph.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from range_report import DeviceWork, Launch, RangeEvent, Trace, heaviest_kernels, summarise, table
from step_tracer import parse_label

_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
"""`NVTX_EVENTS.eventType` in nsys' SQLite schema: two kinds of range, and a domain's creation."""
_PAYLOADS = ("uint64Value", "int64Value", "uint32Value", "int32Value")
_PROCESS_BITS = 24
"""globalTid and globalPid hold the process above these bits."""


def read_nsys(path: Path, domain: str = "stepgraph") -> Trace:
    """A trace from what `nsys export --type sqlite` wrote.

    Tables are only there if something was recorded for them.

    Args:
        path: of the SQLite file.
        domain: NVTX domain whose ranges count.

    Raises:
        ValueError: it has no range of that domain.
    """
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        database.row_factory = sqlite3.Row
        ranges = list(_nvtx_ranges(database, domain))
        if not ranges:
            raise ValueError(
                f"{path} has no NVTX range of the domain {domain!r}; run with STEPGRAPH_NVTX=1 "
                f"and nsys' --trace=cuda,nvtx"
            )
        launches = [
            Launch(
                start=row["start"],
                end=row["end"],
                thread=row["globalTid"],
                correlation=_process(row["globalTid"]) << 32 | row["correlationId"],
                is_graph="GraphLaunch" in (row["name"] or ""),
            )
            for row in _rows(database, "CUPTI_ACTIVITY_KIND_RUNTIME", "nameId")
        ]
        work = [item for table in _WORK_TABLES for item in _work(database, table)]
    return Trace(ranges=ranges, launches=launches, work=work)


_WORK_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "demangledName",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": None,
    "CUPTI_ACTIVITY_KIND_MEMCPY": None,
    "CUPTI_ACTIVITY_KIND_MEMSET": None,
}
"""Tables of device work, with the column that names it."""


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {row["name"] for row in database.execute(f"PRAGMA table_info({table})")}


def _rows(database: sqlite3.Connection, table: str, named: str | None) -> Iterator[sqlite3.Row]:
    """All rows of a table that may be missing, `named` looked up as "name"."""
    columns = _columns(database, table)
    if not columns:
        return iter(())
    if named is None or named not in columns:
        return iter(database.execute(f"SELECT *, NULL AS name FROM {table}"))
    return iter(
        database.execute(
            f"SELECT t.*, s.value AS name FROM {table} t LEFT JOIN StringIds s ON t.{named} = s.id"
        )
    )


def _process(global_id: int) -> int:
    return global_id >> _PROCESS_BITS


def _nvtx_ranges(database: sqlite3.Connection, domain: str) -> Iterator[RangeEvent]:
    columns = _columns(database, "NVTX_EVENTS")
    payloads = [name for name in _PAYLOADS if name in columns]
    rows = list(_rows(database, "NVTX_EVENTS", "textId"))
    domains = {
        (_process(row["globalTid"]), row["domainId"])
        for row in rows
        if row["eventType"] == _DOMAIN and (row["text"] or row["name"]) == domain
    }
    for row in rows:
        is_range = row["eventType"] in (_PUSH_POP, _START_END) and row["end"] is not None
        if not is_range or (_process(row["globalTid"]), row["domainId"]) not in domains:
            continue
        values = [row[name] for name in payloads if row[name] is not None]
        yield RangeEvent(
            name=(row["text"] or row["name"]).partition(":")[0],  # counts may follow
            start=row["start"],
            end=row["end"],
            thread=row["globalTid"],
            num_tokens=values[0] if values else 0,
            bucket=row["category"] or 0,
        )


def _work(database: sqlite3.Connection, table: str) -> Iterator[DeviceWork]:
    kind = table.removeprefix("CUPTI_ACTIVITY_KIND_").lower()
    for row in _rows(database, table, _WORK_TABLES[table]):
        if row["end"]:  # 0 where the driver had no times of a graph
            yield DeviceWork(
                start=row["start"],
                end=row["end"],
                correlation=_process(row["globalPid"]) << 32 | row["correlationId"],
                name=row["name"] or kind,
                is_kernel=kind in ("kernel", "graph_trace"),
            )


def read_torch(path: Path) -> Trace:
    """A trace from `torch.profiler.profile.export_chrome_trace`, ranges as step_tracer labels them.

    Raises:
        ValueError: it has no such range.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    ranges: list[RangeEvent] = []
    launches: list[Launch] = []
    work: list[DeviceWork] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        start = round(1e3 * event["ts"])
        end = start + round(1e3 * event["dur"])
        kind, arguments = event.get("cat"), event.get("args", {})
        correlation = arguments.get("correlation", -1)
        if kind == "user_annotation":
            ranges += _labelled(event, start, end)
        elif kind in ("cuda_runtime", "cuda_driver"):
            is_graph = "GraphLaunch" in event["name"]
            thread = event["tid"]
            launches.append(
                Launch(
                    start=start, end=end, thread=thread, correlation=correlation, is_graph=is_graph
                )
            )
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append(
                DeviceWork(
                    start=start,
                    end=end,
                    correlation=correlation,
                    name=event["name"],
                    is_kernel=kind == "kernel",
                )
            )
    if not ranges:
        raise ValueError(f"{path} has no labelled range; write it with serving_benchmark.py")
    return Trace(ranges=ranges, launches=launches, work=work)


def _labelled(event: dict[str, Any], start: int, end: int) -> list[RangeEvent]:
    label = parse_label(event["name"])
    if label is None:
        return []
    name, num_tokens, bucket = label
    return [
        RangeEvent(
            name=name,
            start=start,
            end=end,
            thread=event["tid"],
            num_tokens=num_tokens,
            bucket=bucket,
        )
    ]


def main() -> None:
    """Print the table, and the kernels that took most time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="SQLite of nsys, or JSON of torch.profiler")
    parser.add_argument("--domain", default="stepgraph", help="NVTX domain")
    parser.add_argument("--kernels", type=int, default=10, help="how many kernels to name")
    args = parser.parse_args()
    is_json = args.trace.suffix == ".json"
    trace = read_torch(args.trace) if is_json else read_nsys(args.trace, args.domain)
    print(table(summarise(trace)))
    if kernels := heaviest_kernels(trace, args.kernels):
        print("\n| kernel | times | ms |\n|---|---|---|")
        for name, count, milliseconds in kernels:
            print(f"| {name[:100]} | {count} | {milliseconds:.3f} |")


if __name__ == "__main__":
    main()
