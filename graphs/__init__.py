"""How a forward pass is launched. Knows tensors, not requests."""

from .capture_sizes import CaptureLadders, Launch
from .captured_graphs import TrialCapture
from .decode_graph import CapturablePlan, GraphSupport
from .forward_model import ForwardModel
from .graph import CaptureError, Graph, GraphPool
from .graph_runner import GraphMode, GraphOptions, GraphRunner, PreparedStep
from .region_compiler import RegionCompiler, RegionStatistics, compiler_refusal
from .step_statistics import StepStatistics

__all__ = [
    "CapturablePlan",
    "CaptureError",
    "CaptureLadders",
    "ForwardModel",
    "Graph",
    "GraphMode",
    "GraphOptions",
    "GraphPool",
    "GraphRunner",
    "GraphSupport",
    "Launch",
    "PreparedStep",
    "RegionCompiler",
    "RegionStatistics",
    "StepStatistics",
    "TrialCapture",
    "compiler_refusal",
]
