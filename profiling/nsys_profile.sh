#!/usr/bin/env bash
# Run a command under nsys with the flags that nsys_report.py needs, export, and print the report.
#
#   profiling/nsys_profile.sh OUTPUT COMMAND...
#
# The command decides what is recorded, by cudaProfilerStart and cudaProfilerStop: give
# serving_benchmark.py --trace cuda with --start-step and --num-steps. See nsys.md.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 OUTPUT COMMAND..." >&2
    exit 2
fi
if ! command -v nsys >/dev/null; then
    echo "nsys is not installed; without it use serving_benchmark.py --trace torch" >&2
    exit 127
fi
output=$1
shift
here=$(cd "$(dirname "$0")" && pwd)

STEPGRAPH_NVTX=1 nsys profile \
    --output="$output" --force-overwrite=true \
    --trace=cuda,nvtx,osrt --cuda-graph-trace=node \
    --sample=none --cpuctxsw=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop \
    "$@"
nsys export --type=sqlite --force-overwrite=true --output="$output.sqlite" "$output.nsys-rep"
"${PYTHON:-python}" "$here/nsys_report.py" "$output.sqlite"
